// SPDX-License-Identifier: MIT
//
// Layers computed through the cache, on ggml's CPU backend and on a device with memory of its own, bit for bit against
// the same layers on the CPU with plain tensors. The device is the CPU behind ggml's RPC server.
#include "fixtures/executor-fixture.h"
#include "fixtures/numbers.h"
#include "fixtures/rpc-device.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

// Precision of each expert of the batch by Eq. 2, in the words of the paper: the best of what its tokens ask for.
static std::vector<precision> worth_of_experts(const layer_input & input, rule_numbers thresholds, size_t n_experts) {
    std::vector<precision> worth(n_experts, precision::skip);
    for (int64_t t = 0; t < input.n_tokens; t++) {
        for (int64_t k = 0; k < input.n_used; k++) {
            const float * weights = &input.weights[size_t(t * input.n_used)];
            double        before  = 0;
            double        sum     = 0;
            bool          first   = true;
            for (int64_t other = 0; other < input.n_used; other++) {
                sum += weights[other];
                if (weights[other] > weights[k]) {
                    before += weights[other];
                    first   = false;
                }
            }
            const double    score = before / sum;
            const precision p     = first || score <= number(thresholds, "t1") ? precision::high
                                    : score <= number(thresholds, "t2")        ? precision::low
                                                                               : precision::skip;
            precision &     best  = worth[size_t(input.ids[size_t(t * input.n_used + k)])];
            best                  = std::max(best, p);
        }
    }
    return worth;
}

// Rows of the high and the low reference, or zeros, by what the selected experts are worth.
static rows compose(const layer_input & input, const std::vector<precision> & worth, const rows & high,
                    const rows & low) {
    rows out = high;
    for (size_t i = 0; i < out.size(); i++) {
        const precision p = worth[size_t(input.ids[i])];
        if (p == precision::low) {
            out[i] = low[i];
        } else if (p == precision::skip) {
            out[i].assign(out[i].size(), 0.0f);
        }
    }
    return out;
}

// A cache on each kind of device.
static std::vector<expert_cache::pool_place> places() {
    return { {}, { rpc_device() } };
}

TEST_CASE("everything high: the output is stock's, whatever the batch and the pool") {
    const model_on_disk m;
    for (const int64_t n_tokens : { 1, 2, 37 }) {
        for (const uint32_t n_slots :
             { 16u, 8u, 3u, 2u, 1u }) { // all layers, one layer, less than a batch, n_used, less
            CAPTURE(n_tokens);
            CAPTURE(n_slots);
            const layer_input input = random_input(m.shape, n_tokens, unsigned(n_tokens));
            engine            e(m, n_slots, 0);
            CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
            CHECK(e.counters.selections[tier_id::high] == uint64_t(n_tokens * 2));
            CHECK(e.counters.layers_computed == 1);
            CHECK((e.counters.waves > 1) ==
                  (n_tokens == 37 ? n_slots < 8 : n_slots < e.counters.misses[tier_id::high]));
        }
    }
}

TEST_CASE("the same batch again finds its experts and gives the same output") {
    const model_on_disk m;
    const layer_input   input    = random_input(m.shape, 2, 5);
    const rows          expected = stock(m, input, tier_id::high);
    for (const auto & place : places()) {
        engine e(m, 8, 0, {}, place);
        CHECK(e.compute(m, input) == expected);
        const uint64_t misses = e.counters.misses[tier_id::high];
        const uint64_t read   = e.counters.bytes_read;
        CHECK(e.compute(m, input) == expected);
        CHECK(e.counters.misses[tier_id::high] == misses);
        CHECK(e.counters.hits[tier_id::high] == misses);
        CHECK(e.counters.bytes_read == read);
    }
}

TEST_CASE("layers take turns in a pool too small for both, or in one with room for all") {
    const model_on_disk m;
    for (const auto & place : places()) {
        for (const uint32_t n_slots : { 16u, 3u, 1u }) {
            engine e(m, n_slots, 0, {}, place);
            for (unsigned token = 0; token < 12; token++) {
                for (layer_id layer = 0; layer < 2; layer++) {
                    const layer_input input = random_input(m.shape, token % 4 == 3 ? 37 : 1 + token % 2, token);
                    CHECK(e.compute(m, input, layer) == stock(m, input, tier_id::high, layer));
                }
            }
            CHECK((e.counters.evictions > 0) == (n_slots < 16));
        }
    }
}

TEST_CASE("one expert has more rows than the batch has tokens, as by a table of experts") {
    const model_on_disk m;
    layer_input         input = random_input(m.shape, 70, 11);
    std::fill(input.ids.begin(), input.ids.end(), 3);
    input.ids.back()    = 5; // in the next wave of one slot
    const rows expected = stock(m, input, tier_id::high);
    for (const auto & place : places()) {
        CHECK(engine(m, 1, 0, {}, place).compute(m, input) == expected);
    }
}

TEST_CASE("tokens choose an expert twice where weights are repacked") {
    moe_model shape = model_on_disk::small();
    shape.high      = GGML_TYPE_Q4_0;
    const model_on_disk m(shape);
    for (const int64_t n_tokens : { 1, 3, 70 }) {
        for (const uint32_t n_slots : { 8u, 1u }) {
            CAPTURE(n_tokens);
            CAPTURE(n_slots);
            layer_input input = random_input(m.shape, n_tokens, 12);
            std::fill(input.ids.begin(), input.ids.end(), 3);
            input.ids.back()                        = n_tokens == 1 ? 3 : 4; // its neighbour
            const expert_cache::pool_place packed   = { ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), true };
            const rows                     expected = stock(m, input, tier_id::high);
            engine                         e(m, n_slots, 0, {}, packed);
            e.compute(m, input); // so that the next one finds them together
            const rows found = e.compute(m, input);
            for (size_t i = 0; i < found.size(); i++) {
                CAPTURE(i);
                double difference = 0.0;
                for (size_t j = 0; j < found[i].size(); j++) {
                    difference = std::max(difference, double(std::abs(found[i][j] - expected[i][j])));
                }
                CHECK(difference < 1e-2);
            }
        }
    }
}

TEST_CASE("no policy changes the output") {
    const model_on_disk m;
    for (const std::string & name : registered_policy::names()) {
        CAPTURE(name);
        rules how;
        how.policy = name;
        engine e(m, 3, 0, how);
        for (unsigned token = 0; token < 40; token++) {
            const layer_id    layer(token % 2);
            const layer_input input = random_input(m.shape, token % 8 == 7 ? 9 : 1, token);
            CHECK(e.compute(m, input, layer) == stock(m, input, tier_id::high, layer));
        }
        CHECK(e.counters.evictions > 0);
        CHECK(e.counters.hits[tier_id::high] > 0);
    }
}

TEST_CASE("t1 = 0: each token's first expert is high, the others are low") {
    const model_on_disk m;
    for (const auto & place : places()) {
        for (const int64_t n_tokens : { 1, 2, 37 }) {
            for (const uint32_t n_slots : { 8u, 2u, 1u }) {
                CAPTURE(n_tokens);
                CAPTURE(n_slots);
                const layer_input input = random_input(m.shape, n_tokens, 7);
                engine            e(m, n_slots, n_slots, rules{ numbers(0.0, 1.0) }, place);
                const auto        worth = worth_of_experts(input, numbers(0.0, 1.0), 8);
                CHECK(e.compute(m, input) ==
                      compose(input, worth, stock(m, input, tier_id::high), stock(m, input, tier_id::low)));
                CHECK(e.counters.selections[tier_id::high] + e.counters.selections[tier_id::low] ==
                      uint64_t(2 * n_tokens));
                CHECK(e.counters.selections_skipped == 0);
            }
        }
    }
}

TEST_CASE("t2 below 1: what is skipped is zero, with a bias and without") {
    moe_model shape = model_on_disk::small();
    shape.n_used    = 4;
    const model_on_disk m(shape);
    const rule_numbers  thresholds = numbers(0.3, 0.6);
    for (const auto & place : places()) {
        for (const bool bias : { false, true }) {
            for (const int64_t n_tokens : { 1, 2, 3 }) {
                CAPTURE(bias);
                CAPTURE(n_tokens);
                const layer_input input = random_input(shape, n_tokens, 11);
                const auto        worth = worth_of_experts(input, thresholds, 8);
                engine            e(m, 8, 8, rules{ thresholds }, place);
                CHECK(e.compute(m, input, 0, bias) == compose(input, worth, stock(m, input, tier_id::high, 0, bias),
                                                              stock(m, input, tier_id::low, 0, bias)));
                uint64_t skipped = 0;
                for (const int32_t id : input.ids) {
                    skipped += worth[size_t(id)] == precision::skip;
                }
                CHECK(e.counters.selections_skipped == skipped);
                CHECK((n_tokens > 1 || skipped > 0));
            }
        }
    }
}

TEST_CASE("an expert that is there in a better precision is used in it") {
    const model_on_disk m;
    const layer_input   input = random_input(m.shape, 1, 13);
    engine              e(m, 8, 8, numbers(0.0, 0.0));
    // all experts of the token come into the high pool
    for (const int32_t id : input.ids) {
        REQUIRE(e.cache.acquire({ 0, uint32_t(id) }, tier_id::high));
        e.cache.request({ 0, uint32_t(id) }, tier_id::high, m.index.layer(0).parts);
        REQUIRE(e.cache.wait({ 0, uint32_t(id) }, tier_id::high, m.index.layer(0).parts).ok());
        e.cache.release({ 0, uint32_t(id) }, tier_id::high);
    }
    CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
    CHECK(e.counters.selections_skipped == 0);
    CHECK(e.counters.hits[tier_id::high] == 2);
}

TEST_CASE("layers with larger experts have slots of their own, and lose them to no other layer") {
    moe_model shape = model_on_disk::small();
    shape.n_embd    = 256; // larger than the file's alignment
    shape.n_ff      = 128;
    model_on_disk m = { shape, [&](gguf_builder & file) {
                           for (const uint32_t block : { 0, 1, 2 }) {
                               moe_model layer   = shape;
                               layer.n_layers    = 1;
                               layer.first_block = block;
                               layer.high        = block == 1 ? GGML_TYPE_F16 : GGML_TYPE_Q8_0;
                               layer.add_high(file);
                           }
                       } };
    for (const auto & place : places()) {
        engine     e(m, 5, 0, {}, place);
        const auto classes = e.cache.demand(m.index.layers()).classes[tier_id::high];
        REQUIRE(classes.size() == 2);
        CHECK(classes[0].n_experts == 8);
        CHECK(classes[1].n_experts == 16);
        CHECK(classes[1].n_layers == 2);
        CHECK(classes[0].size > classes[1].size);
        CHECK(e.cache.bytes(tier_id::high) == 5 * (classes[0].size + classes[1].size));
        for (const int64_t n_tokens : { 1, 37, 1, 1 }) { // 37 tokens use all experts
            for (const layer_id layer : m.index.layers()) {
                const layer_input input = random_input(m.shape, n_tokens, 3 + uint32_t(layer));
                m.shape.high            = layer == 1 ? GGML_TYPE_F16 : GGML_TYPE_Q8_0;
                CHECK(e.compute(m, input, layer) == stock(m, input, tier_id::high, layer));
            }
        }
        const uint64_t before = e.counters.misses[tier_id::high]; // the last token's experts are still there
        for (const layer_id layer : m.index.layers()) {
            e.compute(m, random_input(m.shape, 1, 3 + uint32_t(layer)), layer);
        }
        CHECK(e.counters.misses[tier_id::high] == before);
    }
}

TEST_CASE("experts of one tier may have types of their own") {
    const moe_model     shape = model_on_disk::small();
    const model_on_disk m     = model_on_disk::with_mixed_types();
    for (const int64_t n_tokens : { 1, 21 }) {
        CAPTURE(n_tokens);
        const layer_input input = random_input(shape, n_tokens, 17);
        engine            e(m, 8, 2, numbers(0.0, 1.0));
        engine            on_device(m, 8, 2, rules{ numbers(0.0, 1.0) }, { rpc_device() });
        const rows        out   = e.compute(m, input);
        const auto        worth = worth_of_experts(input, numbers(0.0, 1.0), 8);
        CHECK(on_device.compute(m, input) == out);
        // each expert on its own, as a plain model with one expert
        for (int32_t id = 0; id < 8; id++) {
            const tier_id tier   = tier_of(worth[size_t(id)]);
            layer_input   single = input;
            single.ids.assign(input.ids.size(), 0);
            moe_model one_expert = shape;
            one_expert.n_experts = 1;
            layer_graph graph(one_expert, single);
            graph.set_plain([&](const std::string & part) {
                const part_id         p  = part == "gate" ? part_id::gate : part == "up" ? part_id::up : part_id::down;
                const part_location & at = m.index.locate(tier_id(tier), 0, p, uint32_t(id));
                return plain_weight{ at.type, temp_dir::read(m.index.files()[0]).substr(at.offset, at.size) };
            });
            cpu_backend cpu;
            REQUIRE(ggml_backend_graph_compute(cpu.backend, graph.graph) == GGML_STATUS_SUCCESS);
            const rows expected = graph.output();
            for (size_t i = 0; i < input.ids.size(); i++) {
                if (input.ids[i] == id) {
                    CHECK(out[i] == expected[i]);
                }
            }
        }
    }
}

TEST_CASE("gate and up in one tensor") {
    moe_model shape = model_on_disk::small();
    shape.fused     = true;
    const model_on_disk m(shape);
    for (const int64_t n_tokens : { 1, 5 }) {
        for (const uint32_t n_slots : { 8u, 1u }) {
            const layer_input input = random_input(shape, n_tokens, 19);
            engine            e(m, n_slots, 0);
            CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
        }
    }
}

TEST_CASE("a layer computed node by node, as under an evaluation callback, is the layer") {
    const model_on_disk m;
    for (const uint32_t n_slots : { 8u, 1u }) {
        for (const int64_t n_tokens : { 1, 6 }) {
            CAPTURE(n_slots);
            CAPTURE(n_tokens);
            const layer_input input = random_input(m.shape, n_tokens, 23);
            engine            e(m, n_slots, 0);
            CHECK(compute_node_by_node(e, m, input) == stock(m, input, tier_id::high));
        }
    }
}

//
// errors
//

// The executor's answer to the graph, which it must give for ever after.
static std::string error_of(engine & e, const model_on_disk & m, const layer_input & input, bool with_weights = true) {
    layer_graph graph(m.shape, input);
    graph.set_cached(m.index, 0, with_weights);
    const std::string message = e.executor.compute(graph.graph, e.inner, &e.cpu_graph).message();
    layer_graph       good(m.shape, random_input(m.shape, 1, 1));
    good.set_cached(m.index, 0);
    CHECK(e.executor.compute(good.graph, e.inner, &e.cpu_graph).message() == message);
    return message;
}

TEST_CASE("an expert that does not exist is an error") {
    const model_on_disk m;
    for (const int32_t id : { -1, 8, 1 << 30 }) {
        CAPTURE(id);
        layer_input input = random_input(m.shape, 2, 29);
        input.ids[3]      = id;
        engine e(m, 8, 0);
        CHECK(error_of(e, m, input) ==
              "the router chose expert " + std::to_string(id) +
                  " of 8 in 'blk.0.ffn_gate_exps.weight': the device that computed it is lost or broken");
    }
}

TEST_CASE("a read that fails is an error, whichever it is") {
    const model_on_disk m;
    const layer_input   input = random_input(m.shape, 9, 31);
    for (int n = 0; n < 12; n++) {
        for (const uint32_t n_slots : { 8u, 2u }) {
            CAPTURE(n);
            CAPTURE(n_slots);
            engine e(m, n_slots, 0);
            e.reader.reads_left = n;
            CHECK(error_of(e, m, input) == "the disk is gone");
        }
    }
}

TEST_CASE("a computation that is aborted may be repeated, whatever was on its way") {
    const model_on_disk m;
    const layer_input   input    = random_input(m.shape, 37, 3);
    const rows          expected = stock(m, input, tier_id::high);
    for (const uint32_t n_slots : { 16u, 3u, 1u }) {
        bool was_aborted = true;
        for (int polls = 0; was_aborted; polls += 1 + polls / 8) { // how many depends on what has arrived when
            CAPTURE(n_slots);
            CAPTURE(polls);
            engine           e(m, n_slots, 0);
            std::atomic<int> left       = polls; // threads ask
            const auto       is_aborted = [](void * data) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1)); // it is asked once in each
                return --*static_cast<std::atomic<int> *>(data) < 0;
            };
            ggml_backend_cpu_set_abort_callback(e.compute_on.backend, is_aborted, &left);
            layer_graph graph(m.shape, input);
            graph.set_cached(m.index, 0);
            const status s = e.executor.compute(graph.graph, e.inner, &e.cpu_graph);
            was_aborted    = s.is_aborted();
            CHECK((was_aborted || (s.ok() && polls > 2)));
            ggml_backend_cpu_set_abort_callback(e.compute_on.backend, nullptr, nullptr);
            CHECK(e.compute(m, input, 1) == stock(m, input, tier_id::high, 1));
            CHECK(e.compute(m, input) == expected);
        }
    }
}

TEST_CASE("a read that hangs behind a computation that is aborted is the error of the next one") {
    const model_on_disk m;
    layer_input         input = random_input(m.shape, 1, 3);
    input.ids                 = { 1, 5 };
    rules config;
    config.patience = std::chrono::milliseconds(50);
    std::atomic<bool>     hangs(true);
    engine                e(m, 2, 0, config);
    const part_location & at = m.index.locate(tier_id::high, 0, part_id::down, 5);
    e.reader.before          = [&](uint64_t offset, size_t) {
        while (hangs && offset == at.offset - data_offset(at)) {
            std::this_thread::yield();
        }
    };
    ggml_backend_cpu_set_abort_callback(e.compute_on.backend, [](void *) { return true; }, nullptr);
    layer_graph graph(m.shape, input);
    graph.set_cached(m.index, 0);
    CHECK(e.executor.compute(graph.graph, e.inner, &e.cpu_graph).is_aborted());
    ggml_backend_cpu_set_abort_callback(e.compute_on.backend, nullptr, nullptr);
    layer_input next = input;
    next.ids         = { 0, 2 }; // in place of those
    layer_graph other(m.shape, next);
    other.set_cached(m.index, 0);
    const std::string message = e.executor.compute(other.graph, e.inner, &e.cpu_graph).message();
    CHECK(message.find("the disk has not answered a read") == 0);
    hangs = false;
}

TEST_CASE("thresholds without the router's weights are an error, t1 = 1 needs none") {
    const model_on_disk m;
    const layer_input   input = random_input(m.shape, 1, 37);
    engine              e(m, 8, 8, numbers(0.5, 1.0));
    CHECK(error_of(e, m, input, false) ==
          "the router weights of 'blk.0.ffn_gate_exps.weight' are not known: run this model with t1 = 1");

    engine      high(m, 8, 0);
    layer_graph graph(m.shape, input);
    graph.set_cached(m.index, 0, false);
    CHECK(high.executor.compute(graph.graph, high.inner, &high.cpu_graph).ok());
    CHECK(graph.output() == stock(m, input, tier_id::high));
}
