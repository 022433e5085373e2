#include "textflag.h"

// func prefetch(lines *uintptr, n int)
TEXT ·prefetch(SB), NOSPLIT, $0-16
	MOVD lines+0(FP), R0
	MOVD n+8(FP), R1
	ADD  R1<<3, R0, R1

next:
	CMP  R1, R0
	BHS  done
	MOVD.P 8(R0), R2
	TBNZ $0, R2, write
	PRFM (R2), PLDL1KEEP
	B    next

write:
	PRFM (R2), PSTL1KEEP
	B    next

done:
	RET
