#include "textflag.h"

// func prefetch(lines *uintptr, n int)
TEXT ·prefetch(SB), NOSPLIT, $0-16
	MOVQ lines+0(FP), SI
	MOVQ n+8(FP), CX
	LEAQ (SI)(CX*8), CX

next:
	CMPQ SI, CX
	JAE  done
	MOVQ (SI), AX
	ADDQ $8, SI
	TESTB $1, AX
	JNE  write
	PREFETCHT0 (AX)
	JMP  next

write:
	BYTE $0x0f; BYTE $0x0d; BYTE $0x08 // PREFETCHW (AX), which the assembler does not know
	JMP  next

done:
	RET
