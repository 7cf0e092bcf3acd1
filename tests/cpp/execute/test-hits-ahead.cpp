// SPDX-License-Identifier: MIT
//
// Layers in llama.cpp's queue whose hits run ahead of the router's choice, against the same layers on the CPU with
// plain tensors.
#include "fixtures/executor-fixture.h"
#include "fixtures/rpc-device.h"
#include "ggml-backend-impl.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

// The device under the name of one whose copies have streams of their own: hits run ahead on such devices alone.
static ggml_backend_dev_t device() {
    static ggml_backend_reg         reg  = *ggml_backend_dev_backend_reg(rpc_device());
    static ggml_backend_device      made = *rpc_device();
    static ggml_backend_buffer_type own  = *ggml_backend_dev_buffer_type(rpc_device());
    reg.iface.get_name                   = [](ggml_backend_reg_t) { return "CUDA"; };
    own.device                           = &made;
    own.iface.get_alloc_size             = nullptr; // RPC's asks the server, which does not know the weights
    made.reg                             = &reg;
    made.iface.get_buffer_type           = [](ggml_backend_dev_t) { return &own; };
    made.iface.init_backend              = [](ggml_backend_dev_t, const char *) {
        ggml_backend_t backend = ggml_backend_dev_init(rpc_device(), nullptr);
        backend->device        = &made;
        return backend;
    };
    return &made;
}

static moe_model quantized() {
    moe_model shape = model_on_disk::small();
    shape.n_used    = 4;
    shape.high      = GGML_TYPE_Q8_0;
    return shape;
}

// Computes in llama.cpp's queue. With a host cache the CPU has what is missing on the device, as far as that cache has
// slots.
struct queued_engine : engine {
    inner_graph queued{ compute_on.backend, true };

    queued_engine(const model_on_disk & m, uint32_t n_slots, uint32_t host_slots = 0) :
        engine(m, n_slots, 0, rules{}, { device() }, host_slots, compute_mode::cooperative) {}

    status compute(layer_graph & graph, const model_on_disk & m, layer_id layer) {
        return compute(graph, m, layer, queued);
    }

    status compute(layer_graph & graph, const model_on_disk & m, layer_id layer, inner_graph & in) {
        graph.set_cached(m.index, layer);
        for (int i = 0; i < ggml_graph_n_nodes(graph.graph); i++) { // weights have a buffer, as in llama.cpp
            const ggml_tensor * node = ggml_graph_node(graph.graph, i);
            node->src[0]->buffer     = node->buffer;
        }
        const status s = executor.compute(graph.graph, in, &cpu_graph);
        executor.wait();
        return s;
    }

    rows compute(const model_on_disk & m, const layer_input & input, layer_id layer = 0) {
        layer_graph  graph(m.shape, input, false, ggml_backend_dev_buffer_type(place.device));
        const status s = compute(graph, m, layer);
        CHECK_MESSAGE(s.ok(), s.message());
        return graph.output();
    }
};

// The numbers of slots are not copied, since the device looks them up.
TEST_CASE("a layer whose hits run ahead is one launch, one wait, one read and one copy: the choice") {
    const model_on_disk m(quantized());
    queued_engine       e(m, 8);
    const layer_input   input    = random_input(m.shape, 1, 5);
    const rows          expected = stock(m, input, tier_id::high);
    CHECK(e.compute(m, input) == expected);
    CHECK(e.compute(m, input) == expected); // sends the table
    const uint64_t launches = e.counters.device_launches;
    const uint64_t waits    = e.counters.device_waits;
    const uint64_t reads    = e.counters.device_reads;
    const uint64_t copies   = e.counters.device_copies;
    CHECK(e.compute(m, input) == expected);
    CHECK(e.counters.device_launches - launches == 1);
    CHECK(e.counters.device_waits - waits == 1);
    CHECK(e.counters.device_reads - reads == 1);
    CHECK(e.counters.device_copies - copies == 1);
}

TEST_CASE("a layer whose hits ran ahead may go on in another graph") {
    const model_on_disk m(quantized());
    queued_engine       e(m, 8);
    const layer_input   input = random_input(m.shape, 1, 5);
    e.compute(m, input);
    layer_graph graph(m.shape, input, true, ggml_backend_dev_buffer_type(device()));
    graph.set_cached(m.index, 0);
    const int n_nodes = ggml_graph_n_nodes(graph.graph);
    for (const auto & [first, end] : { std::pair(0, n_nodes - 1), { n_nodes - 1, n_nodes } }) {
        ggml_cgraph view = ggml_graph_view(graph.graph, first, end);
        CHECK(e.executor.compute(&view, e.queued, &e.cpu_graph).ok());
        e.executor.wait();
    }
    CHECK(graph.output() == stock(m, input, tier_id::high, 0, true));
}

TEST_CASE("a context's first layer may run ahead in a pool that another one has filled") {
    const model_on_disk m(quantized());
    queued_engine       e(m, 4);
    layer_input         input = random_input(m.shape, 1, 5);
    e.compute(m, input);
    inner_graph other(e.compute_on.backend, true);
    *std::min_element(input.ids.begin(), input.ids.end()) = // the one that stands for the missing one is none of its
        *std::max_element(input.ids.begin(), input.ids.end()) == 7 ? 6 : 7;
    layer_graph graph(m.shape, input, false, ggml_backend_dev_buffer_type(device()));
    CHECK(e.compute(graph, m, 0, other).ok());
    CHECK(graph.output() == stock(m, input, tier_id::high));
}

// Returns true if nothing has pinned a slot.
static bool can_be_filled(expert_cache & cache) {
    uint32_t n_pinned = 0;
    while (n_pinned < cache.n_slots(tier_id::high) && cache.acquire({ 1, n_pinned }, tier_id::high)) {
        n_pinned++;
    }
    for (uint32_t expert = 0; expert < n_pinned; expert++) {
        cache.release({ 1, expert }, tier_id::high);
    }
    return n_pinned == cache.n_slots(tier_id::high);
}

TEST_CASE("a computation that is aborted behind hits that ran ahead may be repeated, and leaves no slot pinned") {
    const model_on_disk m(quantized());
    const layer_input   input       = random_input(m.shape, 1, 5);
    const expert_id     hit         = { 0, uint32_t(input.ids[0]) };
    bool                was_aborted = true;
    for (int polls = 0; was_aborted; polls++) {
        CAPTURE(polls);
        std::atomic<bool> is_slow(false);
        queued_engine     e(m, 4, 1);             // the CPU has one of three misses
        e.reader.before = [&](uint64_t, size_t) { // so that the others are under way while it computes
            std::this_thread::sleep_for(std::chrono::milliseconds(is_slow ? 5 : 0));
        };
        REQUIRE(e.cache.acquire(hit, tier_id::high));
        e.cache.request(hit, tier_id::high, m.index.layer(0).parts);
        REQUIRE(e.cache.wait(hit, tier_id::high, m.index.layer(0).parts).ok());
        e.cache.release(hit, tier_id::high);
        is_slow                     = true;
        std::atomic<int> left       = polls; // threads ask
        const auto       is_aborted = [](void * data) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1)); // it is asked once in each
            return --*static_cast<std::atomic<int> *>(data) < 0;
        };
        ggml_backend_cpu_set_abort_callback(e.cpu.backend, is_aborted, &left);
        layer_graph  graph(m.shape, input, false, ggml_backend_dev_buffer_type(device()));
        const status s = e.compute(graph, m, 0);
        was_aborted    = s.is_aborted();
        is_slow        = false;
        CHECK((was_aborted || (s.ok() && polls > 2)));
        CHECK(e.counters.hits[tier_id::high] == 1);
        CHECK(e.counters.misses[tier_id::high] == 3);
        ggml_backend_cpu_set_abort_callback(e.cpu.backend, nullptr, nullptr);
        CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
        CHECK(e.counters.selections_cpu > 0);
        CHECK(can_be_filled(e.cache));
        CHECK(e.compute(m, input, 1) == stock(m, input, tier_id::high, 1));
    }
}
