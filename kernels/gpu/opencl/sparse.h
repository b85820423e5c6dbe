// The common part of the kernels that estimate attention scores and select positions from them. Follows common.h,
// rounding.h, glue.h and codes.h with 8-bit codes.
//
//   HEAD_DIM   elements of a head
//   GROUP      query heads that share a key head, its members
//
// Codes lie in slots, in the order in which a plan takes the key heads: slot i holds key head order[i].
//   queries   [slot][member * tokens + token][HEAD_DIM]
//   keys      [slot][key][HEAD_DIM]
//   scores    [slot][member * tokens + token][key]
// A code is (value / step) + 128; a score's code is (q . k of both codes) / 2^exponent + 128. Rows of tokens and keys that
// do not exist have the code 128.
//
//   numbers   of each query head: 1 / its query step, its score step, share of keys to keep, 1 / its key head's key step
//   factors   of each bucket: factors on query step and key step, and their reciprocals; all are powers of two

#define RECIPROCAL_QUERY_STEP x
#define SCORE_STEP y
#define KEEP z
#define RECIPROCAL_KEY_STEP w
#define CODE_ZERO 128

// Rows that a work-group of the kernels that write codes takes.
#define RUN_ROWS 64
#define RUNS_OF(rows) (int)((uint)((rows) + RUN_ROWS - 1) / RUN_ROWS)
#define PIECES ((HEAD_DIM + 7) / 8)

#if defined(__clang__)
#define INTS_OF_CODES(v) __builtin_convertvector(v, int8)
#else
#define INTS_OF_CODES(v) convert_int8(v)
#endif
