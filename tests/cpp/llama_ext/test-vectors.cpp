// SPDX-License-Identifier: MIT
// Vectors, where our patches give them to ggml, have the bits of its loops over single numbers.
#include "fixtures/cpu-graph.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <doctest/doctest.h>

#include <cstring>
#include <vector>

// from ggml-quants.h
extern "C" void quantize_row_q8_K_ref(const float * x, void * y, int64_t k);

TEST_CASE("activations in q8_K have the reference's bytes, also if the largest of a block is there with both signs") {
    constexpr int BLOCK = 256, N_BLOCKS = 40;
    floats        x = random_floats(N_BLOCKS * BLOCK, 1);
    for (int i = 0; i < BLOCK; i++) {
        x[i]             = 0.0F;
        x[BLOCK + i]     = i % 2 == 0 ? -1.5F : 1.5F;
        x[2 * BLOCK + i] = i % 3 == 0 ? 0.25F : -0.0F;
    }
    for (int block = 3; block < N_BLOCKS; block += 2) {
        x[block * BLOCK + 7 * block % BLOCK]  = 9.0F;
        x[block * BLOCK + 13 * block % BLOCK] = -9.0F;
    }
    const size_t      size = ggml_row_size(GGML_TYPE_Q8_K, int64_t(x.size()));
    std::vector<char> ours(size), reference(size);
    ggml_cpu_init();
    ggml_get_type_traits_cpu(GGML_TYPE_Q8_K)->from_float(x.data(), ours.data(), int64_t(x.size()));
    quantize_row_q8_K_ref(x.data(), reference.data(), int64_t(x.size()));
    CHECK(ours == reference);
}

TEST_CASE("a row is multiplied by one value, in each type") {
    for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16 }) {
        CAPTURE(ggml_type_name(type));
        const ggml_context_ptr ctx(ggml_init({ size_t(1) << 20, nullptr, false }));
        ggml_tensor *          rows  = ggml_new_tensor_2d(ctx.get(), type, 100, 7);
        ggml_tensor *          value = ggml_new_tensor_2d(ctx.get(), type, 1, 7);
        for (ggml_tensor * t : { rows, value }) {
            const floats from = random_floats(ggml_nelements(t), 2);
            ggml_get_type_traits_cpu(type)->from_float(from.data(), t->data, ggml_nelements(t));
        }
        ggml_tensor * whole = ggml_repeat(ctx.get(), value, rows); // has the rows' shape
        REQUIRE(compute_on_cpu(ctx.get(), whole, 1) == GGML_STATUS_SUCCESS);
        whole->op            = GGML_OP_NONE;
        ggml_tensor * by_one = ggml_mul(ctx.get(), rows, value);
        ggml_tensor * by_row = ggml_mul(ctx.get(), rows, whole);
        REQUIRE(compute_on_cpu(ctx.get(), by_one, 2) == GGML_STATUS_SUCCESS);
        REQUIRE(compute_on_cpu(ctx.get(), by_row, 2) == GGML_STATUS_SUCCESS);
        CHECK(std::memcmp(by_one->data, by_row->data, ggml_nbytes(by_one)) == 0);
    }
}
