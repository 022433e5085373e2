// AX is the CRC, DI the destination, SI the source, CX how many bytes are left, DX the constants (folds in
// bulk_amd64.go).

#define K2048 0(DX)
#define K1024 16(DX)
#define K512 32(DX)
#define K256 48(DX)
#define K128 64(DX)

// Where bytes go that have been loaded: to the destination, past the caches, or nowhere.
#define KEEP(r, at) VMOVDQU r, at(DI)
#define KEEP512(r, at) VMOVDQU64 r, at(DI)
#define STREAM(r, at) VMOVNTDQ r, at(DI)
#define DROP(r, at) NOP

// FOLD: acc = acc * k + in, as polynomials, lane by lane. k is the lane's distance. t is lost.
#define FOLD(k, t, acc, in) \
	VPCLMULQDQ $0x00, k, acc, t;   \
	VPCLMULQDQ $0x11, k, acc, acc; \
	VPXOR      in, t, t;           \
	VPXOR      t, acc, acc

#define FOLD512(k, t, acc, in) \
	VPCLMULQDQ $0x00, k, acc, t;   \
	VPCLMULQDQ $0x11, k, acc, acc; \
	VPTERNLOGQ $0x96, t, in, acc

// One step of a loop: what is at the source goes to the destination and into acc. in is lost.
#define STEP(SAVE, at, k, t, acc, in) \
	VMOVDQU at(SI), in;  \
	SAVE(in, at);        \
	FOLD(k, t, acc, in)

#define STEP512(SAVE, at, k, t, acc, in) \
	VMOVDQU64 at(SI), in;  \
	SAVE(in, at);          \
	FOLD512(k, t, acc, in)

// Four steps, whose loads all come before the stores. A load that follows a store at once, and whose address has the
// same last 12 bits, waits for it: a source a little behind the destination in its page would be half as fast.
#define STEPS(SAVE, at0, at1, at2, at3, k, t0, t1, acc0, acc1, acc2, acc3, in0, in1, in2, in3) \
	VMOVDQU at0(SI), in0;   \
	VMOVDQU at1(SI), in1;   \
	VMOVDQU at2(SI), in2;   \
	VMOVDQU at3(SI), in3;   \
	SAVE(in0, at0);         \
	SAVE(in1, at1);         \
	SAVE(in2, at2);         \
	SAVE(in3, at3);         \
	FOLD(k, t0, acc0, in0); \
	FOLD(k, t1, acc1, in1); \
	FOLD(k, t0, acc2, in2); \
	FOLD(k, t1, acc3, in3)

#define STEPS512(SAVE, k, t0, t1) \
	VMOVDQU64 0(SI), Z12;       \
	VMOVDQU64 64(SI), Z13;      \
	VMOVDQU64 128(SI), Z14;     \
	VMOVDQU64 192(SI), Z15;     \
	SAVE(Z12, 0);               \
	SAVE(Z13, 64);              \
	SAVE(Z14, 128);             \
	SAVE(Z15, 192);             \
	FOLD512(k, t0, Z0, Z12);    \
	FOLD512(k, t1, Z1, Z13);    \
	FOLD512(k, t0, Z2, Z14);    \
	FOLD512(k, t1, Z3, Z15)

#define FIRST(SAVE, at, acc) \
	VMOVDQU at(SI), acc; \
	SAVE(acc, at)

#define FIRST512(SAVE, at, acc) \
	VMOVDQU64 at(SI), acc; \
	SAVE(acc, at)

#define NEXT(n) \
	ADDQ $n, SI; \
	ADDQ $n, DI; \
	SUBQ $n, CX

// FINISH takes the 16 bytes of X0 for a message, and gives its CRC.
#define FINISH \
	VMOVQ    X0, BX;     \
	VPEXTRQ  $1, X0, R8; \
	XORL     AX, AX;     \
	CRC32Q   BX, AX;     \
	CRC32Q   R8, AX;     \
	VZEROUPPER

// BODY512 takes all but CX%64 bytes, of 64 at least.
#define BODY512(SAVE) \
	VMOVD           AX, X8;                \
	VBROADCASTI32X4 K512, Z9;              \
	CMPQ            CX, $256;              \
	JB              narrow;                \
	VBROADCASTI32X4 K2048, Z10;            \
	FIRST512(SAVE, 0, Z0);                 \
	FIRST512(SAVE, 64, Z1);                \
	FIRST512(SAVE, 128, Z2);               \
	FIRST512(SAVE, 192, Z3);               \
	VPXORQ          Z8, Z0, Z0;            \
	NEXT(256);                             \
	CMPQ            CX, $256;              \
	JB              join;                  \
	PCALIGN         $32;                   \
wide:                                          \
	STEPS512(SAVE, Z10, Z4, Z5);           \
	NEXT(256);                             \
	CMPQ            CX, $256;              \
	JAE             wide;                  \
join:                                          \
	VBROADCASTI32X4 K1024, Z11;            \
	FOLD512(Z11, Z4, Z0, Z2);              \
	FOLD512(Z11, Z6, Z1, Z3);              \
	FOLD512(Z9, Z4, Z0, Z1);               \
	JMP             rest;                  \
narrow:                                        \
	FIRST512(SAVE, 0, Z0);                 \
	VPXORQ          Z8, Z0, Z0;            \
	NEXT(64);                              \
rest:                                          \
	CMPQ            CX, $64;               \
	JB              lanes;                 \
	STEP512(SAVE, 0, Z9, Z4, Z0, Z5);      \
	NEXT(64);                              \
	JMP             rest;                  \
lanes:                                         \
	VBROADCASTI128  K256, Y9;              \
	VMOVDQU         K128, X10;             \
	VEXTRACTI64X4   $1, Z0, Y1;            \
	FOLD(Y9, Y4, Y0, Y1);                  \
	VEXTRACTI128    $1, Y0, X1;            \
	FOLD(X10, X4, X0, X1);                 \
	FINISH

// BODY256 takes all but CX%32 bytes, of 32 at least.
#define BODY256(SAVE) \
	VMOVD           AX, X8;                \
	VBROADCASTI128  K256, Y9;              \
	CMPQ            CX, $256;              \
	JB              narrow;                \
	VBROADCASTI128  K2048, Y10;            \
	FIRST(SAVE, 0, Y0);                    \
	FIRST(SAVE, 32, Y1);                   \
	FIRST(SAVE, 64, Y2);                   \
	FIRST(SAVE, 96, Y3);                   \
	FIRST(SAVE, 128, Y4);                  \
	FIRST(SAVE, 160, Y5);                  \
	FIRST(SAVE, 192, Y6);                  \
	FIRST(SAVE, 224, Y7);                  \
	VPXOR           Y8, Y0, Y0;            \
	NEXT(256);                             \
	CMPQ            CX, $256;              \
	JB              join;                  \
	PCALIGN         $32;                   \
wide:                                          \
	STEPS(SAVE, 0, 32, 64, 96, Y10, Y8, Y11, Y0, Y1, Y2, Y3, Y12, Y13, Y14, Y15);     \
	STEPS(SAVE, 128, 160, 192, 224, Y10, Y8, Y11, Y4, Y5, Y6, Y7, Y12, Y13, Y14, Y15); \
	NEXT(256);                             \
	CMPQ            CX, $256;              \
	JAE             wide;                  \
join:                                          \
	VBROADCASTI128  K1024, Y11;            \
	FOLD(Y11, Y12, Y0, Y4);                \
	FOLD(Y11, Y13, Y1, Y5);                \
	FOLD(Y11, Y14, Y2, Y6);                \
	FOLD(Y11, Y15, Y3, Y7);                \
	VBROADCASTI128  K512, Y11;             \
	FOLD(Y11, Y12, Y0, Y2);                \
	FOLD(Y11, Y13, Y1, Y3);                \
	FOLD(Y9, Y12, Y0, Y1);                 \
	JMP             rest;                  \
narrow:                                        \
	FIRST(SAVE, 0, Y0);                    \
	VPXOR           Y8, Y0, Y0;            \
	NEXT(32);                              \
rest:                                          \
	CMPQ            CX, $32;               \
	JB              lanes;                 \
	STEP(SAVE, 0, Y9, Y12, Y0, Y13);       \
	NEXT(32);                              \
	JMP             rest;                  \
lanes:                                         \
	VMOVDQU         K128, X10;             \
	VEXTRACTI128    $1, Y0, X1;            \
	FOLD(X10, X12, X0, X1);                \
	FINISH

// BODY128 takes all but CX%16 bytes, of 16 at least.
#define BODY128(SAVE) \
	VMOVD           AX, X8;                \
	VMOVDQU         K128, X9;              \
	CMPQ            CX, $128;              \
	JB              narrow;                \
	VMOVDQU         K1024, X10;            \
	FIRST(SAVE, 0, X0);                    \
	FIRST(SAVE, 16, X1);                   \
	FIRST(SAVE, 32, X2);                   \
	FIRST(SAVE, 48, X3);                   \
	FIRST(SAVE, 64, X4);                   \
	FIRST(SAVE, 80, X5);                   \
	FIRST(SAVE, 96, X6);                   \
	FIRST(SAVE, 112, X7);                  \
	VPXOR           X8, X0, X0;            \
	NEXT(128);                             \
	CMPQ            CX, $128;              \
	JB              join;                  \
	PCALIGN         $32;                   \
wide:                                          \
	STEPS(SAVE, 0, 16, 32, 48, X10, X8, X11, X0, X1, X2, X3, X12, X13, X14, X15);     \
	STEPS(SAVE, 64, 80, 96, 112, X10, X8, X11, X4, X5, X6, X7, X12, X13, X14, X15);   \
	NEXT(128);                             \
	CMPQ            CX, $128;              \
	JAE             wide;                  \
join:                                          \
	VMOVDQU         K512, X11;             \
	FOLD(X11, X12, X0, X4);                \
	FOLD(X11, X13, X1, X5);                \
	FOLD(X11, X14, X2, X6);                \
	FOLD(X11, X15, X3, X7);                \
	VMOVDQU         K256, X11;             \
	FOLD(X11, X12, X0, X2);                \
	FOLD(X11, X13, X1, X3);                \
	FOLD(X9, X12, X0, X1);                 \
	JMP             rest;                  \
narrow:                                        \
	FIRST(SAVE, 0, X0);                    \
	VPXOR           X8, X0, X0;            \
	NEXT(16);                              \
rest:                                          \
	CMPQ            CX, $16;               \
	JB              lanes;                 \
	STEP(SAVE, 0, X9, X12, X0, X13);       \
	NEXT(16);                              \
	JMP             rest;                  \
lanes:                                         \
	FINISH

// The same of the last bytes, which go through BX.
#define KEEPWORD(move) move BX, (DI)
#define DROPWORD(move) NOP

// WORDS takes the bytes that are left, eight at a time, then fewer.
#define WORDS(SAVE) \
words:                            \
	CMPQ    CX, $8;           \
	JB      tail;             \
	MOVQ    (SI), BX;         \
	CRC32Q  BX, AX;           \
	SAVE(MOVQ);               \
	NEXT(8);                  \
	JMP     words;            \
tail:                             \
	TESTB   $4, CX;           \
	JEQ     tail2;            \
	MOVL    (SI), BX;         \
	CRC32L  BX, AX;           \
	SAVE(MOVL);               \
	ADDQ    $4, SI;           \
	ADDQ    $4, DI;           \
tail2:                            \
	TESTB   $2, CX;           \
	JEQ     tail1;            \
	MOVWLZX (SI), BX;         \
	CRC32W  BX, AX;           \
	SAVE(MOVW);               \
	ADDQ    $2, SI;           \
	ADDQ    $2, DI;           \
tail1:                            \
	TESTB   $1, CX;           \
	JEQ     done;             \
	MOVBLZX (SI), BX;         \
	CRC32B  BX, AX;           \
	SAVE(MOVB);               \
done:
