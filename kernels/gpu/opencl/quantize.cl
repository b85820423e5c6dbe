// Rounding of activations to int8: a work-item rounds `span` blocks of one token. Follows common.h and
// rounding.h. With -DBLOCK the block is known when compiling.
#ifdef BLOCK
#define INPUTS BLOCK
#else
#define INPUTS block
#endif

__kernel void quantize_activations(
    __global const act_t *restrict x, __global uchar *restrict x_codes, __global float2 *restrict x_blocks,
    int columns, int block, int first_token, int span) {
  const int token = get_global_id(1);
  const int blocks = (uint)columns / INPUTS;
  const int first = get_global_id(0) * span;
  x += (size_t)(first_token + token) * columns;
  x_codes += (size_t)token * columns;
  x_blocks += (size_t)token * blocks;
  for (int b = first; b < min(first + span, blocks); b++)
    // A block whose size the compiler knows would be read at once, which takes twice the registers.
    round_block(x + b * INPUTS, x_codes + b * INPUTS, x_blocks + b, block);
}
