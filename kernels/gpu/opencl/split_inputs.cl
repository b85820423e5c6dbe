// Splits activations into the parts that the matrix unit multiplies: a work-item splits `span` blocks of one token, and
// adds up each block. Follows common.h and matrix_parts.h. CODE_BITS, 4 or 8, are the bits of the weights; of their words
// a mask takes two inputs, which are neighbours here.
#if CODE_BITS == 4
#define PAIRED(v) (v).s04152637
#else
#define PAIRED(v) (v).s02134657
#endif

__kernel void split_inputs(__global const act_t *restrict x, __global ushort *restrict parts,
                           __global float *restrict sums, int columns, int first_token, int span) {
  const int token = get_global_id(1);
  const int blocks = columns / BLOCK;
  const int first = get_global_id(0) * span;
  x += (size_t)(first_token + token) * columns;
  parts += token * PART_ROW(columns);
  sums += (size_t)token * blocks;
  for (int b = first; b < min(first + span, blocks); b++) {
    float8 sum = 0.0f;
    for (int k = b * BLOCK; k < (b + 1) * BLOCK; k += DEPTH)
      for (int i = 0; i < DEPTH; i += 8) {
        float8 rest = load_act8(x, k + i);
        sum += rest;
        UNROLL for (int part = 0; part < PARTS; part++) {
          const uint8 bits = as_uint8(rest) & 0xffff0000u;
          *(__global ushort8 *)(parts + k * PARTS + part * DEPTH + i) =
              __builtin_convertvector(PAIRED(bits >> 16u), ushort8);
          rest -= as_float8(bits);
        }
      }
    sums[b] = sum8(sum);
  }
}
