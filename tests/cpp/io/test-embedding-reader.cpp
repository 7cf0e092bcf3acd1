// SPDX-License-Identifier: MIT
#include "io/embedding-reader.h"

#include "fixtures/fake-reader.h"
#include "fixtures/gguf-builder.h"
#include "fixtures/temp-dir.h"
#include "ggml-alloc.h"
#include "ggml-cpu.h"

#include <cstring>
#include <doctest/doctest.h>
#include <memory>
#include <string>
#include <thread>
#include <vector>

using namespace hobbit;

namespace {

constexpr int64_t N_EMBD  = 256;
constexpr int64_t N_VOCAB = 300;

std::string write_model(const temp_dir & dir, ggml_type type, bool is_tied) {
    gguf_builder    file;
    const moe_model model;
    model.add_high(file);
    file.add("token_embd.weight", type, N_EMBD, N_VOCAB, 1);
    if (!is_tied) {
        file.add("output.weight", type, N_EMBD, N_VOCAB, 1);
    }
    return file.write(dir.path("m.gguf"));
}

// A GET_ROWS over a table of the type, with memory for all but the table.
class lookup {
  public:
    lookup(ggml_type type, const std::vector<int32_t> & rows) :
        ctx_(ggml_init({ 1 << 20, nullptr, /* .no_alloc = */ true }), ggml_free) {
        table                = ggml_new_tensor_2d(ctx_.get(), type, N_EMBD, N_VOCAB);
        ggml_tensor * number = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_I32, int64_t(rows.size()));
        op                   = ggml_get_rows(ctx_.get(), table, number);
        table->data          = this; // no memory of its own
        buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), ggml_backend_cpu_buffer_type()));
        ggml_backend_tensor_set(number, rows.data(), 0, ggml_nbytes(number));
    }

    std::vector<float> output() const {
        std::vector<float> values(ggml_nelements(op));
        ggml_backend_tensor_get(op, values.data(), 0, ggml_nbytes(op));
        return values;
    }

    // ggml's result.
    std::vector<float> expected(const std::string & bytes) {
        table->data                = const_cast<char *>(bytes.data());
        ggml_cgraph *        graph = ggml_new_graph(ctx_.get());
        const ggml_backend_t cpu   = ggml_backend_cpu_init();
        ggml_build_forward_expand(graph, op);
        REQUIRE(ggml_backend_graph_compute(cpu, graph) == GGML_STATUS_SUCCESS);
        ggml_backend_free(cpu);
        return output();
    }

    ggml_tensor * table;
    ggml_tensor * op;

  private:
    std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx_;

    struct free_buffer {
        void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
    };

    std::unique_ptr<ggml_backend_buffer, free_buffer> buffer_;
};

} // namespace

TEST_CASE("rows are what ggml looks up, in every type") {
    const std::vector<int32_t> rows = { 0, 17, 17, N_VOCAB - 1, 3 };
    for (const ggml_type type :
         { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q6_K }) {
        CAPTURE(ggml_type_name(type));
        temp_dir          dir;
        const std::string path = write_model(dir, type, false);
        expert_index      index;
        REQUIRE(index.open(path, "").ok());
        const embedding_table & table = index.embedding();
        CHECK(table.shape.n_in == N_EMBD);
        CHECK(table.shape.n_out == N_VOCAB);
        posix_file_reader reader;
        REQUIRE(reader.open(path).ok());

        lookup           l(type, rows);
        embedding_reader embedding(reader, table);
        REQUIRE(embedding.compute(l.op).ok());
        const std::vector<float> found = l.output();
        CHECK(found == l.expected(temp_dir::read(path).substr(table.location.offset, table.location.size)));
    }
}

TEST_CASE("rows of more than one window are read several at once") {
    fake_reader          reader;
    embedding_reader     embedding(reader, { { 0, 4096, 512 * 4096 * 4, GGML_TYPE_F32 }, { N_EMBD, N_VOCAB } });
    std::vector<int32_t> rows;
    for (int32_t row = 0; row < 150; row++) {
        rows.push_back(row * 4 % 299); // in blocks of their own
    }
    lookup      l(GGML_TYPE_F32, rows);
    status      result;
    std::thread computes([&] { result = embedding.compute(l.op); });
    CHECK(reader.wait_begun(embedding_reader::n_threads).size() ==
          embedding_reader::n_threads); // though none has ended
    reader.open_gate();
    computes.join();
    REQUIRE(result.ok());
    CHECK(reader.begun().size() == rows.size());
    const std::vector<float> values = l.output();
    for (size_t i = 0; i < rows.size(); i++) {
        const std::string expected(N_EMBD * sizeof(float), fake_reader::byte_at(4096 + uint64_t(rows[i]) * 1024));
        CHECK(std::memcmp(&values[i * N_EMBD], expected.data(), expected.size()) == 0);
    }
}

TEST_CASE("an embedding that is the output matrix as well is not looked up alone") {
    temp_dir     dir;
    expert_index index;
    REQUIRE(index.open(write_model(dir, GGML_TYPE_F16, true), "").ok());
    CHECK(index.embedding().location.size == 0);
}

TEST_CASE("a token that is not in the vocabulary, and a read that fails, are errors") {
    fake_reader reader;
    reader.open_gate();
    embedding_reader embedding(reader, { { 0, 4096, N_VOCAB * N_EMBD * 4, GGML_TYPE_F32 }, { N_EMBD, N_VOCAB } });
    for (const int32_t row : { -1, int32_t(N_VOCAB) }) {
        lookup l(GGML_TYPE_F32, { 0, row });
        CHECK(embedding.compute(l.op).message().find("is not in the vocabulary of 300 tokens") != std::string::npos);
    }
    reader.fail_at(4096, "the disk is gone");
    lookup l(GGML_TYPE_F32, { 0 });
    CHECK(embedding.compute(l.op).message() == "the disk is gone");
}
