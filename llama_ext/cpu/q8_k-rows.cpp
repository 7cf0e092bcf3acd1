// SPDX-License-Identifier: MIT
// Activations are converted to q8_K by vectors, with the values of quantize_row_q8_K_ref. cmake/llama-options.cmake
// gives another name to the function of ggml that does so on x86.
#include "quants.h"

#include "ggml-quants.h"

#include <algorithm>
#include <cmath>

#ifdef __x86_64__

extern "C" void quantize_row_q8_K(const float * x, void * y, int64_t k) {
    auto * to = static_cast<block_q8_K *>(y);
    for (; k > 0; k -= QK_K, x += QK_K, to++) {
        float least = 0, most = 0;
#pragma omp simd reduction(min : least) reduction(max : most)
        for (int j = 0; j < QK_K; j++) {
            least = least < x[j] ? least : x[j];
            most  = most > x[j] ? most : x[j];
        }
        if (most == -least) { // the first of them counts
            quantize_row_q8_K_ref(x, to, QK_K);
            continue;
        }
        const float iscale = -127.f / (most > -least ? most : least);
        for (int j = 0; j < QK_K; j++) {
            to->qs[j] = std::min(127, int(rintf(iscale * x[j])));
        }
        for (int j = 0; j < QK_K / 16; j++) {
            int sum = 0;
            for (int i = 0; i < 16; i++) {
                sum += to->qs[16 * j + i];
            }
            to->bsums[j] = sum;
        }
        to->d = 1 / iscale;
    }
}

#endif
