#include "textflag.h"
#include "fold_amd64.h"

// func copyWords(crc uint32, dst, src *byte, n int) uint32
TEXT ·copyWords(SB), NOSPLIT, $0-36
	MOVL crc+0(FP), AX
	MOVQ dst+8(FP), DI
	MOVQ src+16(FP), SI
	MOVQ n+24(FP), CX
	WORDS(KEEPWORD)
	MOVL AX, ret+32(FP)
	RET

// func crcWords(crc uint32, src *byte, n int) uint32
TEXT ·crcWords(SB), NOSPLIT, $0-28
	MOVL crc+0(FP), AX
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	WORDS(DROPWORD)
	MOVL AX, ret+24(FP)
	RET

// func copy512(crc uint32, dst, src *byte, n int) uint32
TEXT ·copy512(SB), NOSPLIT, $0-36
	MOVL crc+0(FP), AX
	MOVQ dst+8(FP), DI
	MOVQ src+16(FP), SI
	MOVQ n+24(FP), CX
	LEAQ ·folds(SB), DX
	BODY512(KEEP512)
	WORDS(KEEPWORD)
	MOVL AX, ret+32(FP)
	RET

// func stream512(crc uint32, dst, src *byte, n int) uint32
TEXT ·stream512(SB), NOSPLIT, $0-36
	MOVL crc+0(FP), AX
	MOVQ dst+8(FP), DI
	MOVQ src+16(FP), SI
	MOVQ n+24(FP), CX
	LEAQ ·folds(SB), DX
	BODY512(STREAM)
	SFENCE
	MOVL AX, ret+32(FP)
	RET

// func crc512(crc uint32, src *byte, n int) uint32
TEXT ·crc512(SB), NOSPLIT, $0-28
	MOVL crc+0(FP), AX
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	LEAQ ·folds(SB), DX
	BODY512(DROP)
	WORDS(DROPWORD)
	MOVL AX, ret+24(FP)
	RET

// func copy256(crc uint32, dst, src *byte, n int) uint32
TEXT ·copy256(SB), NOSPLIT, $0-36
	MOVL crc+0(FP), AX
	MOVQ dst+8(FP), DI
	MOVQ src+16(FP), SI
	MOVQ n+24(FP), CX
	LEAQ ·folds(SB), DX
	BODY256(KEEP)
	WORDS(KEEPWORD)
	MOVL AX, ret+32(FP)
	RET

// func stream256(crc uint32, dst, src *byte, n int) uint32
TEXT ·stream256(SB), NOSPLIT, $0-36
	MOVL crc+0(FP), AX
	MOVQ dst+8(FP), DI
	MOVQ src+16(FP), SI
	MOVQ n+24(FP), CX
	LEAQ ·folds(SB), DX
	BODY256(STREAM)
	SFENCE
	MOVL AX, ret+32(FP)
	RET

// func crc256(crc uint32, src *byte, n int) uint32
TEXT ·crc256(SB), NOSPLIT, $0-28
	MOVL crc+0(FP), AX
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	LEAQ ·folds(SB), DX
	BODY256(DROP)
	WORDS(DROPWORD)
	MOVL AX, ret+24(FP)
	RET

// func copy128(crc uint32, dst, src *byte, n int) uint32
TEXT ·copy128(SB), NOSPLIT, $0-36
	MOVL crc+0(FP), AX
	MOVQ dst+8(FP), DI
	MOVQ src+16(FP), SI
	MOVQ n+24(FP), CX
	LEAQ ·folds(SB), DX
	BODY128(KEEP)
	WORDS(KEEPWORD)
	MOVL AX, ret+32(FP)
	RET

// func crc128(crc uint32, src *byte, n int) uint32
TEXT ·crc128(SB), NOSPLIT, $0-28
	MOVL crc+0(FP), AX
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	LEAQ ·folds(SB), DX
	BODY128(DROP)
	WORDS(DROPWORD)
	MOVL AX, ret+24(FP)
	RET

// func wide() bool
TEXT ·wide(SB), NOSPLIT, $0-1
	MOVL  $7, AX
	XORL  CX, CX
	CPUID
	SHRL  $10, CX
	ANDL  $1, CX
	MOVB  CX, ret+0(FP)
	RET
