/* Making packed matrices at load time, and reading single rows back for token embeddings. */
#include "matrix.h"
#include "threads.h"

/* codes [rows, K] bytes into the layout of matrix.h; rows past the end of the last tile hold code 0. */
void fp_pack_codes(const uint8_t *codes, int num_rows, int in_features, int kind, uint8_t *out) {
    size_t size = (size_t)in_features;
    memset(out, 0, (size_t)((num_rows + TILE - 1) / TILE) * code_bytes(kind, size));
    uint8_t flip = kind == KIND_SIGNED && HAS_DOT_PRODUCT ? 0x80 : 0;
    for (int row = 0; row < num_rows; row++) {
        const uint8_t *from = codes + (size_t)row * size;
        uint8_t *tile = out + (size_t)(row / TILE) * code_bytes(kind, size);
        size_t lane = (size_t)(row % TILE);
        if (kind != KIND_NIBBLE) {
            for (size_t k = 0; k < size; k++)
                tile[(k / 4 * TILE + lane) * 4 + k % 4] = from[k] ^ flip;
            continue;
        }
        for (size_t k = 0; k < size; k += 32)
            for (size_t j = 0; j < 16; j++)
                tile[((k / 32 * 4 + j / 4) * TILE + lane) * 4 + j % 4] =
                    (uint8_t)((from[k + j] & 15) | from[k + 16 + j] << 4);
    }
}

/* scales [rows, groups] float32 into [tiles, groups, TILE], as float16 (exact by the caller's choice) or float32. */
void fp_pack_scales(const float *scales, int num_rows, int num_groups, int is_wide, void *out) {
    size_t groups = (size_t)num_groups, padded = (size_t)((num_rows + TILE - 1) / TILE) * TILE;
    memset(out, 0, padded * groups * (is_wide ? sizeof(float) : sizeof(_Float16)));
    for (int row = 0; row < num_rows; row++)
        for (size_t g = 0; g < groups; g++) {
            size_t at = ((size_t)(row / TILE) * groups + g) * TILE + (size_t)(row % TILE);
            float value = scales[(size_t)row * groups + g];
            if (is_wide)
                ((float *)out)[at] = value;
            else
                ((_Float16 *)out)[at] = (_Float16)value;
        }
}

INLINE float scale_at(const void *scales, size_t at, int is_wide) {
    return is_wide ? ((const float *)scales)[at] : (float)((const _Float16 *)scales)[at];
}

static void unpack_row(const fp_segment *segment, int in_features, int row, float *out) {
    const int kind = segment->kind, group = group_of(kind);
    const size_t size = (size_t)in_features, lane = (size_t)(row % TILE), tile_index = (size_t)(row / TILE);
    const uint8_t *tile = segment->codes + tile_index * code_bytes(kind, size);
    int shift = segment->minimums != NULL ? -1 : zero_shift(kind), zero = shift < 0 ? 0 : 1 << shift;
    for (size_t k = 0; k < size; k++) {
        int code;
        if (kind == KIND_NIBBLE) {
            uint8_t both = tile[((k / 32 * 4 + k % 16 / 4) * TILE + lane) * 4 + k % 4];
            code = k % 32 < 16 ? both & 15 : both >> 4;
        } else {
            uint8_t stored = tile[(k / 4 * TILE + lane) * 4 + k % 4];
            code = kind == KIND_SIGNED && !HAS_DOT_PRODUCT ? (int8_t)stored : stored;
        }
        size_t at = (tile_index * (size / (size_t)group) + k / (size_t)group) * TILE + lane;
        float value = (float)(code - zero) * scale_at(segment->scales, at, segment->has_wide_scales);
        if (segment->minimums != NULL)
            value += scale_at(segment->minimums, at, segment->has_wide_scales);
        out[k] = value;
    }
}

/* out[i] = row ids[i] of the matrix's first segment, times factor. Returns 0, or -1 when an id is out of range. */
int fp_embed(const fp_matrix *matrix, const int64_t *ids, int num_ids, float factor, float *out) {
    const fp_segment *segment = &matrix->segments[0];
    size_t size = (size_t)matrix->in_features;
    for (int i = 0; i < num_ids; i++) {
        if (ids[i] < 0 || ids[i] >= segment->num_rows)
            return -1;
        unpack_row(segment, matrix->in_features, (int)ids[i], out + (size_t)i * size);
        if (factor != 1.0f)
            for (size_t k = 0; k < size; k++)
                out[(size_t)i * size + k] *= factor;
    }
    return 0;
}
