// The common part of the attention kernels; follows common.h, rounding.h and glue.h.
//
// Causal attention with grouped heads over the KV cache, with an online softmax over blocks of keys
// (FlashAttention: Dao et al. 2022), which stores no score matrix.
//
//   HEAD_DIM   elements of a head
//   ROWS       query rows of a work-group. The query heads that share a key head are stacked with the tokens:
//              row r of a key head is token r / group, head r % group, so that all of them share one read of a key.
//
// A score is scale * (query . key), in units of log2; with a soft cap it is cap * tanh(scale * (query . key)),
// and the cap holds those units. No cap is 0.
//
// Grid: row tiles (the last ones, which see most keys, first), key heads, parts of the context. With several parts
// each one writes sums, largest score and total weight, which attention_join joins. Parts are whole pages, as many as the
// context of the sequence itself requires: neither the grid nor other sequences of the pass change any sum.
// A pass of several sequences has the tiles of one token for each.
//
// With -DSINKS each head has one more score, of value zero and seen by all rows, in units of the natural logarithm. It
// belongs to the first part. A sink of -infinity is none.
//
// With -DGATHERED each query head has tiles of its own, of BLOCK rows or a part of them, and sees only the positions that
// were selected for its block of BLOCK rows (select.cl):
//   MEMBERS      query heads that share a key head
//
// With CODE_BITS the kernel that writes the output also rounds it to int8:
//   CODE_HEADS   smallest number of heads that holds whole blocks; divides the heads that a work-group writes

// Below every score, and finite: a row that sees no key of a block gives each of them a weight of 1, which the first
// visible key makes vanish.
#define NO_SCORE -1e30f
#define PARTIAL_COLUMNS (HEAD_DIM + 2)

// The first key that a token sees: of the last `window` keys; with CHUNKED of its chunk of `window`; 0 is all.
#ifdef CHUNKED
#define FIRST_KEY(token, window) ((token) - (int)((uint)(token) % (uint)(window)))
#define IS_HIDDEN(key, token, window) ((key) < FIRST_KEY(token, window))
#else
#define FIRST_KEY(token, window) ((window) > 0 ? (token) - (window) + 1 : 0)
#define IS_HIDDEN(key, token, window) ((window) > 0 && (key) <= (token) - (window))
#endif

typedef struct {
  int first_row;     // of the tile
  int rows;          // of the tile that exist
  int position;      // of the sequence's first token
  int sequence;      // number of the sequence, whose first token has this row of queries and output
  int start;         // first key of this part that any row sees, or one before it that begins a page
  int stop;          // behind the last one
} attention_tile;

// A quotient of numbers below 2^20, which a phone's GPU divides faster as floats.
#define QUOTIENT(number, divisor) ((uint)(((float)(number) + 0.5f) / (float)(divisor)))
// Keys of a part, for a context of so many.
#define PART_KEYS(keys, parts) (QUOTIENT(((uint)(keys) + PAGE - 1) / PAGE + (parts) - 1, parts) * PAGE)

static inline attention_tile find_tile(__global const int *step, int number, int part, int parts, int group,
                                       int window, int row_words) {
  attention_tile tile;
  const int tiles = ((uint)group + ROWS - 1) / ROWS;
  tile.sequence = row_words ? (uint)number / (uint)tiles : 0;
  number -= tile.sequence * tiles;
  step += tile.sequence * row_words;
  tile.position = step[STEP_POSITION];
  tile.first_row = number * ROWS;
  const int tokens = TOKENS_OF(step, row_words), keys = tile.position + tokens;
  const int part_keys = PART_KEYS(keys, parts), first_key = part * part_keys;
  tile.rows = first_key < keys ? min(ROWS, tokens * group - tile.first_row) : 0;
  const int first_token = tile.position + (uint)tile.first_row / (uint)group;
  const int last_token = tile.position + (uint)max(0, tile.first_row + tile.rows - 1) / (uint)group;
  tile.start = max(max(FIRST_KEY(first_token, window), 0) & -PAGE, first_key);
  tile.stop = min(last_token + 1, first_key + part_keys);
  return tile;
}

// The largest score and the total weight of a row before its first key.
#ifdef SINKS
#define SINKS_ARGUMENT , __global const float *sinks
#define FIRST_SCORE(head, part) ((part) ? NO_SCORE : max(sinks[head] * 1.44269504f, NO_SCORE))
#define FIRST_WEIGHT(first) ((first) > NO_SCORE ? 1.0f : 0.0f)
#else
#define SINKS_ARGUMENT
#define FIRST_SCORE(head, part) NO_SCORE
#define FIRST_WEIGHT(first) 0.0f
#endif

#ifdef GATHERED
#define GATHER_ARGUMENTS                                                                                               \
  , __global const int *order, __global const int *positions, __global const int *counts, int first_slot, int blocks,  \
      int most, int all_heads
// The row of a position, behind that of position 0.
#define ROW_OF(pages, position, kv_heads)                                                                               \
  (HEAD_AT((pages)[(uint)(position) / PAGE], 0, kv_heads, HEAD_DIM) + (uint)(position) % PAGE * HEAD_DIM)

// The query head of a work-group, counted in slots of key heads.
static inline int gathered_head(__global const int *order, int first_slot, uint number) {
  return order[first_slot + number / MEMBERS] * MEMBERS + number % MEMBERS;
}

static inline attention_tile find_gathered_tile(__global const int *step, int number, __global const int *counts) {
  attention_tile tile;
  tile.position = step[STEP_POSITION];
  tile.sequence = 0;
  tile.first_row = number * ROWS;
  tile.rows = min(ROWS, step[STEP_LENGTH] - tile.first_row);
  tile.start = 0;
  tile.stop = counts[(uint)tile.first_row / BLOCK];
  return tile;
}
#else
#define GATHER_ARGUMENTS
#endif

// The row of a tile's row of queries among the heads of all tokens of the pass.
#define HEAD_ROW(tile, row, heads, kv_head, group)                                                                     \
  ((tile.sequence + (uint)(row) / (uint)(group)) * (heads) + (kv_head) * (group) + (uint)(row) % (uint)(group))

#ifdef CODE_BITS
// With several parts attention_join writes the output and rounds it.
#define PARTS 1
#define HEADS_BLOCKS (CODE_HEADS * HEAD_DIM / CODE_BLOCK)

// Rounds the work-group's output of a tile.
static inline void round_tile(attention_tile tile, int group, int kv_head, int heads, __global const act_t *out,
                              __global uchar *codes, __global float2 *code_blocks) {
  wait_for_values();
  // The divisors are known when compiling where a division would be slow.
  for (uint i = get_local_id(0); i < (uint)max(0, tile.rows) / CODE_HEADS * HEADS_BLOCKS; i += WG) {
    uint row = tile.first_row + i / HEADS_BLOCKS * CODE_HEADS;
    size_t at = HEAD_ROW(tile, row, heads, kv_head, group);
    round_written(out, codes, code_blocks, at * HEAD_DIM / CODE_BLOCK + i % HEADS_BLOCKS);
  }
}
#else
#define PARTS get_num_groups(2)
#endif
