// SPDX-License-Identifier: MIT
#include "../../llama_ext/cpu/plain-rows.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <vector>

extern __attribute__((weak)) const plain_kernel q2_0_kernel; // null without AVX2

TEST_CASE("products of Q2_0 have the bits of ggml's function") {
    const ggml_type_traits_cpu & traits = *ggml_get_type_traits_cpu(GGML_TYPE_Q2_0);
    REQUIRE(traits.vec_dot_type == GGML_TYPE_Q8_0);
    if (!&q2_0_kernel) {
        return;
    }
    ggml_cpu_init();

    std::mt19937 random(2511);
    for (int i = 0; i < 3000; i++) {
        const int n = int(ggml_blck_size(GGML_TYPE_Q2_0)) * int(1 + random() % 40);
        // any bytes are weights; each block begins with its scale, two bytes, which must be finite
        std::vector<uint8_t> x(ggml_row_size(GGML_TYPE_Q2_0, n));
        std::vector<uint8_t> y(ggml_row_size(GGML_TYPE_Q8_0, n));
        for (std::vector<uint8_t> * row : { &x, &y }) {
            for (uint8_t & byte : *row) {
                byte = uint8_t(random());
            }
        }
        for (size_t at = 0; at < x.size(); at += ggml_type_size(GGML_TYPE_Q2_0)) {
            const ggml_fp16_t scale = ggml_fp32_to_fp16(float(int(random() % 2000) - 1000) / 3e4F);
            std::memcpy(&x[at], &scale, sizeof scale);
        }
        for (size_t at = 0; at < y.size(); at += ggml_type_size(GGML_TYPE_Q8_0)) {
            const ggml_fp16_t scale = ggml_fp32_to_fp16(float(random() % 1000) / 2e4F);
            std::memcpy(&y[at], &scale, sizeof scale);
        }

        float sum      = 0;
        float expected = 0;
        q2_0_kernel.dot(n, &sum, 0, x.data(), 0, y.data(), 0, 1);
        traits.vec_dot(n, &expected, 0, x.data(), 0, y.data(), 0, 1);
        REQUIRE(std::memcmp(&sum, &expected, sizeof sum) == 0);
    }
}
