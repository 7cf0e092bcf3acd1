// SPDX-License-Identifier: MIT
#include "attention.h"
#include "row-lanes.h"

#ifdef HAS_ROW_LANES

int ggml_cpu_transpose_keys(const ggml_tensor * k, int64_t first, int64_t head, int64_t stack, int most, float * to,
                            int64_t stride) {
    if (k->type != GGML_TYPE_F16 || k->ne[0] % 8 != 0) {
        return 0;
    }
    const char * keys = (const char *) k->data + first * k->nb[1] + head * k->nb[2] + stack * k->nb[3];
    int          n    = 0;
    for (; n + LANES <= most; n += LANES) {
        row_lanes rows = { {}, k->nb[1] };
        for (int i = 0; i < LANES; i += 4) {
            rows.fours[i / 4] = keys + (n + i) * k->nb[1];
        }
        for (int64_t d = 0; d < k->ne[0]; d += 8) {
            int_lanes pairs[4];
            load_words(pairs, rows, d * sizeof(ggml_fp16_t));
            for (int j = 0; j < 8; j++) {
                const float_lanes numbers = halves(pairs[j / 2] >> j % 2 * 16);
                memcpy(to + (d + j) * stride + n, &numbers, sizeof(numbers));
            }
        }
    }
    return n;
}
#else
int ggml_cpu_transpose_keys(const ggml_tensor *, int64_t, int64_t, int64_t, int, float *, int64_t) {
    return 0;
}
#endif
