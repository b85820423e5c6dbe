// The matrix unit of CPUs that have AMX: tiles of up to 16 rows of 64 bytes. Follows linear_wide.h.
//
// A product of tiles takes as long for one token as for 16, and adds in an order that their number does not change.

// The shapes of all tiles, as the processor reads them.
typedef struct {
  uchar palette, start_row, reserved[14];
  ushort row_bytes[16];
  uchar rows[16];
} tile_shapes_t;

#define TILE_SHAPES(shapes) __builtin_ia32_tile_loadconfig((const void *)(size_t)(shapes));
#define TILE_LOAD(tile, source, stride) __builtin_ia32_tileloadd64(tile, (const void *)(size_t)(source), stride);
#define TILE_STORE(tile, target) __builtin_ia32_tilestored64(tile, (void *)(size_t)(target), 64);
#define TILE_ZERO(tile) __builtin_ia32_tilezero(tile);
#define TILES_FREE() __builtin_ia32_tilerelease();

// Tiles 0 and 1 are the sums of two vectors of columns, 2 and 3 their weights, and those from 4 on inputs.
#define FIRST_INPUTS 4
