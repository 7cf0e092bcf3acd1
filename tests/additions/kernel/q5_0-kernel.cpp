// SPDX-License-Identifier: MIT
// A kernel that is ggml's own, and says so when it first multiplies.
#include "plain-rows.h"

#include <cstdio>

static void dot(int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by, int nrc) {
    static const int written = std::fputs("the added kernel multiplies\n", stderr);
    (void) written;
    ggml_get_type_traits_cpu(GGML_TYPE_Q5_0)->vec_dot(n, s, bs, vx, bx, vy, by, nrc);
}

extern const plain_kernel q5_0_kernel = { GGML_TYPE_Q5_0, dot, nullptr, 1, INT64_MAX };
