// SPDX-License-Identifier: MIT
#include "hobbit.h"

#include "fixtures/layer-graph.h"
#include "fixtures/model-fixture.h"
#include "ggml-cpp.h"

#include <doctest/doctest.h>
#include <string>

// A model whose token embedding stays on disk, and a graph that looks tokens up.
struct lookup_graph {
    temp_dir                dir;
    gguf_builder            file;
    std::string             path;
    model_ptr               model;
    ggml_context_ptr        ctx{ ggml_init({ 1 << 20, nullptr, /* .no_alloc = */ true }) };
    ggml_backend_buffer_ptr table_memory;
    ggml_backend_buffer_ptr memory;
    ggml_backend_ptr        backend;
    ggml_tensor *           tokens;
    ggml_tensor *           rows;
    ggml_cgraph *           graph;

    static constexpr int64_t width = 64;

    lookup_graph() {
        moe_model().add_high(file);
        file.add("token_embd.weight", GGML_TYPE_F32, width, 65536, 1);
        file.add("output.weight", GGML_TYPE_F16, width, 32, 1);
        path  = file.write(dir.path("m.gguf"));
        model = opened(path, { number("hobbit.pools", 90000) });
        context_of(model, 2);

        ggml_tensor * table = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, width, 65536);
        ggml_set_name(table, "token_embd.weight");
        table_memory.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), hobbit_buffer_type(model.get(), -1)));
        REQUIRE(table_memory);
        tokens = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 2);
        rows   = ggml_get_rows(ctx.get(), table, tokens);
        graph  = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, ggml_reshape_3d(ctx.get(), rows, width, 1, 2));
        memory.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_cpu_buffer_type()));
        backend.reset(ggml_backend_init_by_name("HOBBIT", nullptr));
        REQUIRE((memory && backend));
    }

    ggml_status look_up(int32_t first, int32_t second) {
        const int32_t which[] = { first, second };
        ggml_backend_tensor_set(tokens, which, 0, sizeof(which));
        return ggml_backend_graph_compute(backend.get(), graph);
    }

    std::string row(int64_t i) const {
        return { static_cast<const char *>(rows->data) + size_t(i) * rows->nb[1], width * sizeof(float) };
    }

    std::string row_of_file(int32_t token) const {
        return file.data("token_embd.weight").substr(size_t(token) * width * sizeof(float), width * sizeof(float));
    }
};

TEST_CASE("rows are looked up where views stand beside it, and not where they are not asked for") {
    lookup_graph g;
    REQUIRE(ggml_graph_n_nodes(g.graph) == 2);
    CHECK(g.look_up(7, 65535) == GGML_STATUS_SUCCESS);
    CHECK(g.row(0) == g.row_of_file(7));
    CHECK(g.row(1) == g.row_of_file(65535));
    g.rows->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
    CHECK(g.look_up(-1, 1 << 30) == GGML_STATUS_SUCCESS);
    CHECK(g.row(0) == g.row_of_file(7));
}

TEST_CASE("a look-up that fails is told by hobbit_check, and repeated") {
    lookup_graph g;
    char         err[512] = "";
    CHECK(hobbit_check(g.model.get(), err, sizeof(err)));
    CHECK(g.look_up(1, 65536) == GGML_STATUS_FAILED);
    CHECK_FALSE(hobbit_check(g.model.get(), err, sizeof(err)));
    char last[512] = "";
    hobbit_last_error(last, sizeof(last));
    CHECK(std::string(err) == last);
    CHECK(std::string(err).find("65536") != std::string::npos);
    CHECK(g.look_up(1, 2) == GGML_STATUS_FAILED);
}
