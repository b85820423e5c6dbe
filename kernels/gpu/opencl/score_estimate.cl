// Estimates attention scores with the very codes of an integer NPU graph. Follows sparse.h.
//
// Sums of products of codes stay below 2^24, so floats hold them exactly, and so they do their product with a power of
// two.
//
// Grid: blocks of TILE_KEYS keys, tiles of TILE_ROWS rows, slots from first_slot on.

#if WG == 1
#define TILE_KEYS 64
#define TILE_ROWS 64
#define STEP_ROWS 4
#else
#define TILE_KEYS WG
#define TILE_ROWS 8
#endif

#if WG == 1
#if defined(__clang__) && defined(__AVX2__) && HEAD_DIM % 2 == 0
// A part is two elements as 16-bit integers, whose products the processor adds in one instruction.
typedef int part_t;
typedef int8 part8;
typedef short pairs16 __attribute__((__vector_size__(32)));
#define PARTS_OF_HEAD (HEAD_DIM / 2)
#define PART(codes, d)                                                                                                 \
  ((((int)(codes)[2 * (d)] - CODE_ZERO) & 0xffff) | ((int)(codes)[2 * (d) + 1] - CODE_ZERO) << 16)
#define ADD_PRODUCTS(a, b, sum)                                                                                        \
  ((sum) + __builtin_astype(                                                                                           \
               __builtin_ia32_pmaddwd256(__builtin_astype(a, pairs16), __builtin_astype(b, pairs16)), int8))
#else
typedef float part_t;
typedef float8 part8;
#define PARTS_OF_HEAD HEAD_DIM
#define PART(codes, d) ((float)(codes)[d] - (float)CODE_ZERO)
#define ADD_PRODUCTS(a, b, sum) FMA(a, b, sum)
#endif
#endif

static inline float8 code_values(uchar8 codes) { return FLOATS_OF_CODES(codes) - (float)CODE_ZERO; }

static inline uchar8 score_codes(float8 sum, float multiplier) {
  const float8 value = sum * multiplier;
  const float8 held = value < -128.0f ? (float8)-128.0f : value > 127.0f ? (float8)127.0f : value;
  return CODES_OF_INTS(ROUND8(held) + CODE_ZERO);
}

GROUP_SIZE __kernel void estimate_scores(__global const uchar *restrict queries, __global const uchar *restrict keys,
                                         __global uchar *restrict scores, int first_slot, int rows, int key_count,
                                         float multiplier) {
  const int slot = first_slot + get_group_id(2), first_key = get_group_id(0) * TILE_KEYS;
  const int first_row = get_group_id(1) * TILE_ROWS, row_count = min(TILE_ROWS, rows - first_row);
  const int count = min(TILE_KEYS, key_count - first_key);
  queries += ((size_t)slot * rows + first_row) * HEAD_DIM;
  keys += ((size_t)slot * key_count + first_key) * HEAD_DIM;
  scores += ((size_t)slot * rows + first_row) * key_count + first_key;
#if WG == 1
  // Keys are transposed, so that a vector has one part of several keys.
  part8 columns[PARTS_OF_HEAD * TILE_KEYS / 8];
  part_t values[STEP_ROWS * PARTS_OF_HEAD];
  for (int key = 0; key < TILE_KEYS; ++key) {
    __global const uchar *own = keys + (size_t)min(key, count - 1) * HEAD_DIM;
    for (int d = 0; d < PARTS_OF_HEAD; ++d) ((part_t *)columns)[d * TILE_KEYS + key] = PART(own, d);
  }
  for (int row = 0; row < row_count; row += STEP_ROWS) {
    for (int i = 0; i < STEP_ROWS; ++i) {
      __global const uchar *own = queries + (size_t)min(row + i, row_count - 1) * HEAD_DIM;
      for (int d = 0; d < PARTS_OF_HEAD; ++d) values[i * PARTS_OF_HEAD + d] = PART(own, d);
    }
    for (int key = 0; key < count; key += 16) {
      part8 sums[STEP_ROWS * 2];
      UNROLL for (int i = 0; i < STEP_ROWS * 2; ++i) sums[i] = 0;
      for (int d = 0; d < PARTS_OF_HEAD; ++d) {
        const part8 low = columns[(d * TILE_KEYS + key) / 8], high = columns[(d * TILE_KEYS + key) / 8 + 1];
        UNROLL for (int i = 0; i < STEP_ROWS; ++i) {
          const part8 value = values[i * PARTS_OF_HEAD + d];
          sums[2 * i] = ADD_PRODUCTS(value, low, sums[2 * i]);
          sums[2 * i + 1] = ADD_PRODUCTS(value, high, sums[2 * i + 1]);
        }
      }
      for (int i = 0; i < min(STEP_ROWS, row_count - row); ++i) {
        __global uchar8 *target = (__global uchar8 *)(scores + (size_t)(row + i) * key_count + key);
        target[0] = score_codes(FLOATS_OF_CODES(sums[2 * i]), multiplier);
        target[1] = score_codes(FLOATS_OF_CODES(sums[2 * i + 1]), multiplier);
      }
    }
  }
#else
  __local float8 row_pieces[TILE_ROWS * PIECES];
  __local float *values = (__local float *)row_pieces;
  const int lane = get_local_id(0);
  for (uint i = lane; i < TILE_ROWS * PIECES * 8; i += WG) {
    const uint row = min(i / (PIECES * 8), (uint)row_count - 1), d = i % (PIECES * 8);
    values[i] = d < HEAD_DIM ? (float)queries[row * HEAD_DIM + d] - (float)CODE_ZERO : 0.0f;
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  __global const uchar *own = keys + min(lane, count - 1) * HEAD_DIM;
#define CLEAR(r) float8 sum##r = 0.0f;
#define ADD(r) sum##r = FMA(row_pieces[r * PIECES + d / 8], key, sum##r);
  float8 whole = 0.0f;
  REPEAT(TILE_ROWS, CLEAR)
  for (int d = 0; d < HEAD_DIM; d += 8) {
#if HEAD_DIM % 8
    float8 key = 0.0f;
    for (int i = 0; i < min(8, HEAD_DIM - d); ++i) ((float *)&key)[i] = (float)own[d + i] - (float)CODE_ZERO;
#else
    const float8 key = code_values(*(__global const uchar8 *)(own + d));
#endif
    REPEAT(TILE_ROWS, ADD)
  }
#define GATHER(r) whole.s##r = sum8(sum##r);
  REPEAT(TILE_ROWS, GATHER)
  const uchar8 codes = score_codes(whole, multiplier);
#define STORE(r)                                                                                                       \
  if (r < row_count)                                                                                                   \
    scores[(size_t)r * key_count + lane] = codes.s##r;
  if (lane < count) {
    REPEAT(TILE_ROWS, STORE)
  }
#endif
}
