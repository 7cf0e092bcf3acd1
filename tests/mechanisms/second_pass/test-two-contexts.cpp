// SPDX-License-Identifier: MIT
//
// Contexts of one model, in one thread and in several.
#include "fixtures/layer-graph.h"
#include "fixtures/model-fixture.h"
#include "ggml-cpp.h"

#include <atomic>
#include <doctest/doctest.h>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

static constexpr uint32_t N_VOCAB = 1000;

static const std::vector<hobbit_setting> DRAFTS = { number("hobbit.pools", 100 << 10), number("hobbit.t1", 0.3),
                                                    number("hobbit.t2", 0.9), number("hobbit.confidence", 0.5) };

namespace {

// A context whose batches are one token for each of its sequences.
struct decoding_context {
    const uint32_t       n_sequences;
    context_ptr          context;
    layer_graph          graph;
    ggml_backend_ptr     backend{ ggml_backend_init_by_name("HOBBIT", nullptr) };
    std::vector<int32_t> sequences;
    std::vector<int32_t> positions;
    std::vector<int8_t>  outputs;
    uint32_t             n_repeated = 0;

    decoding_context(const model_ptr & model, uint32_t n) :
        n_sequences(n),
        context(context_of(model, n)),
        graph(moe_model(), random_input(moe_model(), n, n)),
        positions(n, 1),
        outputs(n, 1) {
        graph.set_in_buffer(hobbit_buffer_type(model.get(), 0));
        auto * reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend.get()));
        reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"))(backend.get(), 1);
        for (uint32_t i = 0; i < n; i++) {
            sequences.push_back(int32_t(i));
        }
    }

    void begin(bool can_repeat = true) {
        hobbit_begin_batch(context.get(), n_sequences, sequences.data(), positions.data(), outputs.data(), can_repeat);
    }

    ggml_status compute() { return ggml_backend_graph_compute(backend.get(), graph.graph); }

    // Returns true if the logits, by which all tokens are equally probable, ask for a second pass.
    bool repeats(uint32_t n_rows) {
        const std::vector<float> logits(size_t(n_rows) * N_VOCAB);
        return hobbit_repeats_batch(context.get(), logits.data(), n_rows, N_VOCAB);
    }

    void decode() {
        begin();
        CHECK(compute() == GGML_STATUS_SUCCESS);
        if (hobbit_is_draft(context.get()) && repeats(n_sequences)) {
            CHECK(compute() == GGML_STATUS_SUCCESS);
            n_repeated++;
        }
        hobbit_end_batch(context.get());
    }
};

} // namespace

static std::string failure_of(const model_ptr & model) {
    char err[512] = "";
    hobbit_check(model.get(), err, sizeof(err));
    return err;
}

TEST_CASE("two contexts with a confidence compute in two threads") {
    const files      f;
    const model_ptr  model = opened(f.tiers_path, DRAFTS);
    decoding_context one(model, 1);
    decoding_context four(model, 4);
    const auto       run = [](decoding_context & context) {
        for (int i = 0; i < 50; i++) {
            context.decode();
        }
    };
    std::thread other(run, std::ref(four));
    run(one);
    other.join();
    CHECK(one.n_repeated == 50);
    CHECK(four.n_repeated == 50);
    CHECK(failure_of(model) == "");
    CHECK(counters_of(model.get()).at("tokens_repeated") == 50 * 5);
}

TEST_CASE("two contexts in two threads compute the same as one after the other") {
    const files      f;
    const model_ptr  model = opened(f.tiers_path, DRAFTS);
    decoding_context three(model, 3);
    decoding_context two(model, 2);
    three.decode();
    const rows expected_three = three.graph.output();
    two.decode();
    const rows  expected_two = two.graph.output();
    std::thread other([&] {
        for (int i = 0; i < 20; i++) {
            two.decode();
            CHECK(two.graph.output() == expected_two);
        }
    });
    for (int i = 0; i < 20; i++) {
        three.decode();
        CHECK(three.graph.output() == expected_three);
    }
    other.join();
}

TEST_CASE("a batch of another thread waits until the context has ended its own, or is closed") {
    const files      f;
    const model_ptr  model = opened(f.tiers_path, { number("hobbit.pools", 100 << 10) });
    decoding_context first(model, 1);
    decoding_context second(model, 1);
    for (const bool is_closed : { false, true }) {
        CAPTURE(is_closed);
        std::atomic<bool> is_done{ false };
        first.begin();
        std::thread other([&] {
            second.decode();
            is_done = true;
        });
        for (int i = 0; i < 5; i++) {
            CHECK(first.compute() == GGML_STATUS_SUCCESS);
        }
        CHECK_FALSE(is_done);
        is_closed ? first.context.reset() : hobbit_end_batch(first.context.get());
        other.join();
    }
}

TEST_CASE("a thread that begins a batch of another context has left the one before") {
    const files      f;
    const model_ptr  model = opened(f.tiers_path, DRAFTS);
    decoding_context first(model, 1);
    decoding_context second(model, 2);
    first.begin();
    CHECK(hobbit_is_draft(first.context.get()));
    second.begin(false);
    CHECK_FALSE(hobbit_is_draft(first.context.get()));
    CHECK_FALSE(hobbit_is_draft(second.context.get())); // it cannot repeat
    CHECK(second.compute() == GGML_STATUS_SUCCESS);
    hobbit_end_batch(first.context.get()); // no batch of its own: nothing happens
    second.begin();
    CHECK(hobbit_is_draft(second.context.get()));
}

TEST_CASE("logits of another number of tokens than the batch has are refused") {
    for (const uint32_t n_rows : { 1u, 3u, 5u }) {
        const files      f;
        const model_ptr  model = opened(f.tiers_path, DRAFTS);
        decoding_context four(model, 4);
        four.begin();
        CHECK(four.compute() == GGML_STATUS_SUCCESS);
        CHECK(four.repeats(n_rows)); // and the second pass fails
        CHECK(four.compute() == GGML_STATUS_FAILED);
        CHECK(failure_of(model).find("of " + std::to_string(n_rows) + " tokens, and it has 4") != std::string::npos);
    }
}

TEST_CASE("contexts have sequences of their own, also where the numbers are the same") {
    const files          f;
    const hobbit_setting strict = { "hobbit.strict", 1.0, nullptr }; // whatever is resident
    const model_ptr      model  = opened(f.tiers_path, { number("hobbit.pools", 100 << 10), strict });
    decoding_context     first(model, 1);
    decoding_context     second(model, 1);
    const hobbit_setting none      = number("hobbit.t2", 0.0);
    const auto           n_skipped = [&] { return counters_of(model.get()).at("selections_skipped"); };
    REQUIRE(hobbit_change_sequence_settings(second.context.get(), 0, &none, 1, nullptr, 0));
    first.decode();
    CHECK(n_skipped() == 0);
    second.decode();
    const double n = n_skipped();
    CHECK(n > 0);
    hobbit_begin_sequence(first.context.get(), 0);
    second.decode();
    CHECK(n_skipped() == 2 * n);

    second.context.reset(); // and its thresholds with it
    second.context = context_of(model, 1);
    second.decode();
    CHECK(n_skipped() == 2 * n);
}

TEST_CASE("what has no lock may be asked while the layers are placed") {
    const files       f;
    const model_ptr   model = opened_file(f.tiers_path, { number("hobbit.pools", 100 << 10) });
    std::atomic<bool> is_placed{ false };
    std::thread       observer([&] {
        uint64_t hits[2];
        uint64_t misses[2];
        while (!is_placed) {
            CHECK(hobbit_oldest_read(model.get()) == 0.0);
            hobbit_get_layer_uses(model.get(), hits, misses, 2);
            CHECK(hits[0] + misses[1] == 0);
        }
    });
    CHECK(hobbit_place_layers(model.get(), nullptr, 0, true, nullptr, 0));
    is_placed = true;
    observer.join();
}

TEST_CASE("a confidence is refused where a token cannot be computed twice") {
    const files     f;
    const model_ptr model    = opened_file(f.tiers_path, DRAFTS);
    char            err[512] = "";
    CHECK_FALSE(hobbit_place_layers(model.get(), nullptr, 0, false, err, sizeof(err)));
    CHECK(std::string(err).find("run this model with confidence = 0") != std::string::npos);
}

TEST_CASE("an exception that is not about memory is told as an internal error") {
    const files      f;
    const model_ptr  model = opened(f.tiers_path, { number("hobbit.pools", 100 << 10) });
    decoding_context context(model, 1);
    const auto       fails = [](const hobbit_layer_event *, void *) { throw std::out_of_range("no such layer"); };
    hobbit_set_observer(model.get(), fails, nullptr);
    context.begin();
    CHECK(context.compute() == GGML_STATUS_FAILED);
    CHECK(failure_of(model).find("internal error: no such layer") == 0);
}
