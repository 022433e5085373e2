#include "textflag.h"

// func copyWords(crc uint32, dst, src *byte, n int) uint32
TEXT ·copyWords(SB), NOSPLIT, $0-36
	MOVWU crc+0(FP), R9
	MOVD  dst+8(FP), R0
	MOVD  src+16(FP), R1
	MOVD  n+24(FP), R2
	SUBS  $64, R2
	BLO   rest

	PCALIGN $16
next:
	LDP     (R1), (R3, R4)
	LDP     16(R1), (R5, R6)
	LDP     32(R1), (R7, R8)
	LDP     48(R1), (R10, R11)
	ADD     $64, R1
	CRC32CX R3, R9
	CRC32CX R4, R9
	STP     (R3, R4), (R0)
	CRC32CX R5, R9
	CRC32CX R6, R9
	STP     (R5, R6), 16(R0)
	CRC32CX R7, R9
	CRC32CX R8, R9
	STP     (R7, R8), 32(R0)
	CRC32CX R10, R9
	CRC32CX R11, R9
	STP     (R10, R11), 48(R0)
	ADD     $64, R0
	SUBS    $64, R2
	BHS     next

rest: // R2 has 64 too few
	ADD $64, R2

words:
	SUBS    $8, R2
	BLO     tail
	MOVD.P  8(R1), R3
	CRC32CX R3, R9
	MOVD.P  R3, 8(R0)
	B       words

tail: // of R2 the lowest three bits count
	TBZ     $2, R2, tail2
	MOVWU.P 4(R1), R3
	CRC32CW R3, R9
	MOVW.P  R3, 4(R0)

tail2:
	TBZ     $1, R2, tail1
	MOVHU.P 2(R1), R3
	CRC32CH R3, R9
	MOVH.P  R3, 2(R0)

tail1:
	TBZ     $0, R2, done
	MOVBU   (R1), R3
	CRC32CB R3, R9
	MOVB    R3, (R0)

done:
	MOVW R9, ret+32(FP)
	RET
