// How float inputs of the matrix unit lie in memory. Follows common.h. BLOCK is the inputs that share a scale.
//
// A float is the sum of three numbers of 8 bits, and a half of two. They lie in ushort [token][columns / DEPTH][PARTS]
// [DEPTH] as the upper halves of floats, with a gap behind each row: rows a multiple of 4096 bytes apart would evict
// each other from the cache.
#ifdef ACT_HALF
#define PARTS 2
#else
#define PARTS 3
#endif
#if BLOCK < 32
#define DEPTH BLOCK
#else
#define DEPTH 32
#endif
#define PART_ROW(columns) ((size_t)(columns) * PARTS + 32)
