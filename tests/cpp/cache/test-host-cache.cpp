// SPDX-License-Identifier: MIT
//
// A cache of experts in host memory between the disk and the pools of a device.
#include "fixtures/executor-fixture.h"
#include "fixtures/numbers.h"
#include "fixtures/page-locked.h"
#include "fixtures/rpc-device.h"

#include <random>
#include <string>
#include <thread>
#include <vector>

static engine engine_with_host(const model_on_disk & m, uint32_t n_high, uint32_t n_low, uint32_t n_host,
                               const rule_numbers & thresholds = {}) {
    return { m, n_high, n_low, rules{ thresholds }, { rpc_device() }, n_host };
}

static std::string whole_file(const model_on_disk & m) {
    return temp_dir::read(m.index.files()[0]);
}

// Bytes that are read for an expert, and bytes that it has.
static std::pair<uint64_t, uint64_t> expert_bytes(const model_on_disk & m, expert_id id, tier_id tier) {
    std::pair<uint64_t, uint64_t> sum;
    for (const part_id part : { part_id::gate, part_id::up, part_id::down }) {
        const part_location & at  = m.index.locate(tier, id.layer, part, id.expert);
        sum.first                += aligned_span(at);
        sum.second               += at.size;
    }
    return sum;
}

static moe_model on_blocks() {
    moe_model m = model_on_disk::small();
    m.n_embd    = 256;
    m.n_ff      = 128; // 64 KiB a part
    return m;
}

TEST_CASE("the output is the same, whatever the host has room for") {
    const model_on_disk m;
    for (const uint32_t n_device : { 6u, 1u }) {
        for (const uint32_t n_host : { 16u, 3u, 1u }) {
            engine e = engine_with_host(m, n_device, 0, n_host);
            for (const int64_t n_tokens : { 1, 2, 37, 1 }) {
                for (layer_id layer = 0; layer < 2; layer++) {
                    CAPTURE(n_device);
                    CAPTURE(n_host);
                    CAPTURE(n_tokens);
                    const layer_input input = random_input(m.shape, n_tokens, unsigned(n_tokens));
                    CHECK(e.compute(m, input, layer) == stock(m, input, tier_id::high, layer));
                }
            }
        }
    }
}

TEST_CASE("host memory whose buffers hold a few experts each") {
    const model_on_disk m(on_blocks());
    const layer_input   input = random_input(m.shape, 9, 3);
    page_locked         memory;
    const size_t        slot_size = 3 * (64 * 1024 + file_reader::alignment);
    rules               config;
    memory.max_size = 3 * slot_size;
    for (const compute_mode mode : { compute_mode::gpu, compute_mode::cooperative }) {
        engine e(m, 4, 0, config, { rpc_device() }, 8, mode, &memory.type);
        CHECK(e.host->n_slots(tier_id::high) >= 6);
        CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
        CHECK(e.compute(m, input, 1) == stock(m, input, tier_id::high, 1));
        CHECK(ggml_backend_buft_get_max_size(&memory.type) < e.host->bytes(tier_id::high));
    }
    CHECK(memory.n_allocated >= 4);
}

TEST_CASE("low precision") {
    const layer_input   input = random_input(model_on_disk::small(), 5, 7);
    const model_on_disk m;
    engine              on_cpu(m, 8, 3, numbers(0.0, 1.0));
    for (const uint32_t n_host : { 8u, 2u }) {
        CAPTURE(n_host);
        engine low = engine_with_host(m, 8, 3, n_host, numbers(0.0, 1.0));
        CHECK(low.compute(m, input) == on_cpu.compute(m, input));
        CHECK(low.counters.selections[tier_id::low] > 0);
    }
}

TEST_CASE("device hits, host hits and reads from disk add up to the uses, and in bytes") {
    const model_on_disk m(on_blocks());
    engine              e     = engine_with_host(m, 3, 0, 9); // fewer than the 16 experts
    uint64_t            uses  = 0;
    const auto          bytes = expert_bytes(m, { 0, 0 }, tier_id::high);
    for (unsigned seed = 0; seed < 40; seed++) {
        e.compute(m, random_input(m.shape, 1, seed), layer_id(seed % 2));
        uses += m.shape.n_used;
    }
    const uint64_t device = e.counters.hits[tier_id::high];
    const uint64_t host   = e.counters.host_hits[tier_id::high];
    const uint64_t disk   = e.counters.bytes_read / bytes.first;
    CHECK(device > 0);
    CHECK(host > 0);
    CHECK(disk > 16); // some twice
    CHECK(device + host + disk == uses);
    CHECK(e.counters.bytes_read == disk * bytes.first);
    CHECK(e.counters.bytes_transferred == (host + disk) * bytes.second);
    CHECK(e.counters.misses[tier_id::high] == host + disk);
}

TEST_CASE("what host memory has is not read again") {
    const model_on_disk m;
    engine              e = engine_with_host(m, 2, 0, 16);
    for (int pass = 0; pass < 2; pass++) {
        e.compute(m, random_input(m.shape, 37, 1));
    }
    const uint64_t read   = e.counters.bytes_read;
    const uint64_t misses = e.counters.misses[tier_id::high];
    const uint64_t hits   = e.counters.host_hits[tier_id::high];
    const auto     input  = random_input(m.shape, 37, 2);
    CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
    CHECK(e.counters.bytes_read == read);
    CHECK(e.counters.misses[tier_id::high] > misses);
    CHECK(e.counters.misses[tier_id::high] - misses == e.counters.host_hits[tier_id::high] - hits);
}

static void fill_ahead(bool past_host) {
    const model_on_disk    m(on_blocks());
    engine                 e = engine_with_host(m, 2, 0, 5);
    std::vector<expert_id> order;
    if (past_host) {
        e.host->make_exclusive(tier_id::high);
    }
    for (uint32_t i = 0; i < 8; i++) {
        order.push_back({ 0, 7 - i });
    }
    const uint32_t n_both = past_host ? 0 : 2; // that both levels have
    e.cache.fill(tier_id::high, order);
    e.host->fill(tier_id::high, { order.begin() + 2, order.end() });
    while (!e.cache.arrived(order[1], tier_id::high, ALL) || !e.host->arrived(order[6 - n_both], tier_id::high, ALL)) {
        std::this_thread::yield();
    }
    CHECK(e.host->holds(order[0], tier_id::high, {}) == !past_host);
    const auto bytes = expert_bytes(m, order[0], tier_id::high);
    CHECK(e.counters.bytes_read == (7 - n_both) * bytes.first);
    CHECK(e.counters.bytes_prefetched == e.counters.bytes_read);
    CHECK(e.counters.bytes_transferred == 2 * bytes.second);

    const auto input = random_input(m.shape, 37, 1);
    CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
    CHECK(e.counters.hits[tier_id::high] == 2);
    CHECK(e.counters.host_hits[tier_id::high] == 5 - n_both);
    CHECK(e.counters.misses[tier_id::high] == 6);
}

TEST_CASE("pools that are filled ahead are used like any others") {
    fill_ahead(true);
    fill_ahead(false);
}

static void load(engine & e, expert_id id) {
    REQUIRE(e.cache.acquire(id, tier_id::high));
    e.cache.request(id, tier_id::high, ALL);
    REQUIRE(e.cache.wait(id, tier_id::high, ALL).ok());
    e.cache.release(id, tier_id::high);
}

// The first experts of a layer, in their order.
static void load_first(engine & e, uint32_t n) {
    e.host->make_exclusive(tier_id::high);
    for (uint32_t expert = 0; expert < n; expert++) {
        load(e, { 0, expert });
    }
}

TEST_CASE("what is on the device gives way in host memory to what is not") {
    const model_on_disk m(on_blocks());
    engine              e = engine_with_host(m, 4, 0, 4);
    load_first(e, 8);
    const uint64_t read = e.counters.bytes_read;
    for (uint32_t expert = 0; expert < 8; expert++) {
        CHECK(e.cache.holds({ 0, expert }, tier_id::high, ALL) == (expert >= 4));
        CHECK(e.host->holds({ 0, expert }, tier_id::high, ALL) ==
              (expert < 3 || expert == 7)); // 7 came last, through it
    }
    load(e, { 0, 1 });
    CHECK(e.counters.bytes_read == read);
}

TEST_CASE("what has left the device is kept in host memory like any other") {
    const model_on_disk m(on_blocks());
    engine              e = engine_with_host(m, 1, 0, 2);
    load_first(e, 3);
    CHECK_FALSE(e.host->holds({ 0, 0 }, tier_id::high, {})); // the least recent one
    CHECK(e.host->holds({ 0, 1 }, tier_id::high, ALL));
}

TEST_CASE("an expert may be pinned and used in host memory, and then goes to the device without a read") {
    const model_on_disk m(on_blocks());
    engine              e  = engine_with_host(m, 2, 0, 2);
    const expert_id     id = { 1, 5 };
    REQUIRE(e.host->acquire(id, tier_id::high));
    e.host->request(id, tier_id::high, ALL);
    REQUIRE(e.host->wait(id, tier_id::high, ALL).ok());
    CHECK_FALSE(e.cache.holds(id, tier_id::high, {}));
    CHECK(e.cache.holds_below(id, tier_id::high, ALL));
    CHECK(e.counters.bytes_transferred == 0);
    const uint64_t read = e.counters.bytes_read;
    REQUIRE(e.cache.acquire(id, tier_id::high));
    e.cache.request(id, tier_id::high, ALL);
    REQUIRE(e.cache.wait(id, tier_id::high, ALL).ok());
    for (const part_id part : { part_id::gate, part_id::up, part_id::down }) {
        const part_location & at    = m.index.locate(tier_id::high, id.layer, part, id.expert);
        const std::string     bytes = whole_file(m).substr(at.offset, at.size);
        CHECK(std::string(e.host->data(id, tier_id::high, part), at.size) == bytes);
        CHECK(device_bytes(e.cache, id, tier_id::high, part, at.size) == bytes);
    }
    CHECK(e.counters.bytes_read == read);
    e.cache.release(id, tier_id::high);
    e.host->release(id, tier_id::high);
}

TEST_CASE("where all of the host's slots are pinned, what is read passes them by") {
    const model_on_disk m;
    engine              e = engine_with_host(m, 4, 0, 1);
    REQUIRE(e.host->acquire({ 1, 7 }, tier_id::high));
    const layer_input input = random_input(m.shape, 3, 1);
    CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
    CHECK(e.host->holds({ 1, 7 }, tier_id::high, {}));
    CHECK(e.host_counters.evictions == 0);
    e.host->release({ 1, 7 }, tier_id::high);
    CHECK(e.compute(m, input, 1) == stock(m, input, tier_id::high, 1));
    CHECK(e.host_counters.evictions > 0); // no pin is left behind
}

TEST_CASE("an error of reading ends the computation") {
    const model_on_disk m;
    engine              e   = engine_with_host(m, 4, 0, 4);
    e.reader.reads_left     = 4;
    const layer_input input = random_input(m.shape, 7, 1);
    layer_graph       graph(m.shape, input, false, ggml_backend_dev_buffer_type(e.place.device));
    graph.set_cached(m.index, 0);
    CHECK(e.executor.compute(graph.graph, e.inner, &e.cpu_graph).message() == "the disk is gone");
}

// Takes turns between both levels, with prefetches that are used, dropped or overtaken.
static void use_at_random(const model_on_disk & m, tier_id tier, uint32_t n_device, uint32_t n_host) {
    engine            e    = engine_with_host(m, n_device, n_device, n_host);
    const std::string file = whole_file(m);
    if (n_host <= n_device) {
        e.host->make_exclusive(tier);
    }
    std::mt19937 random(5);
    size_t       wrong   = 0;
    size_t       n_ahead = 0;
    for (int step = 0; step < 600; step++) {
        const expert_id id   = { layer_id(random() % 2), uint32_t(random() % 8) };
        const uint32_t  what = uint32_t(random() % 8);
        if (what < 2) {
            n_ahead += e.cache.prefetch(id, tier, ALL);
        } else if (what == 2) {
            e.cache.end_prefetch(id.layer);
        } else if (what == 3 && e.host->acquire(id, tier)) {
            e.host->request(id, tier, part_id::up);
            wrong += !e.host->wait(id, tier, part_id::up).ok();
            e.host->release(id, tier);
        } else if (what > 3) {
            REQUIRE(e.cache.acquire(id, tier));
            e.cache.request(id, tier, part_id::up);
            e.cache.request(id, tier, ALL);
            wrong += !e.cache.wait(id, tier, ALL).ok();
            for (const part_id part : { part_id::gate, part_id::up, part_id::down }) {
                const part_location & at = m.index.locate(tier, id.layer, part, id.expert);
                wrong += device_bytes(e.cache, id, tier, part, at.size).compare(file.substr(at.offset, at.size)) != 0;
            }
            e.cache.release(id, tier);
        }
        REQUIRE(wrong == 0);
    }
    CHECK(n_ahead > 0);
    CHECK(e.host_counters.evictions > 0);
}

TEST_CASE("both levels hold what the file does, whoever asks for what in which order") {
    const model_on_disk m;
    use_at_random(m, tier_id::high, 2, 5);
    use_at_random(m, tier_id::low, 5, 2);
    use_at_random(m, tier_id::high, 3, 1);
}
