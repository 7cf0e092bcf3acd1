// SPDX-License-Identifier: MIT
#include "fixtures/cache-fixture.h"
#include "fixtures/fake-reader.h"

#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <thread>

// The part's bytes on disk.
static std::string expected_bytes(const opened_model & m, tier_id tier, expert_id id, part_id part) {
    const part_location & at = m.index.locate(tier, id.layer, part, id.expert);
    return m.bytes.substr(at.offset, at.size);
}

static std::string cached_bytes(const opened_model & m, const expert_cache & cache, tier_id tier, expert_id id,
                                part_id part) {
    return { cache.data(id, tier, part), m.index.locate(tier, id.layer, part, id.expert).size };
}

// Loads every expert of the tier in turn into too small a pool and compares all its parts.
static void check_all_data(opened_model & m, tier_id tier) {
    cache_of<posix_file_reader> c(m);
    REQUIRE(c.reader.open(m.index.files()[0]).ok());
    c.allocate(tier, 3);
    for (layer_id layer = 0; layer < m.index.n_layers(); layer++) {
        const part_set parts = m.index.layer(layer).parts;
        for (uint32_t expert = 0; expert < m.index.layer(layer).n_experts; expert++) {
            const expert_id id = { layer, expert };
            REQUIRE(c.cache.acquire(id, tier));
            c.cache.request(id, tier, parts);
            REQUIRE(c.cache.wait(id, tier, parts).ok());
            for (const part_id part : parts) {
                CHECK(cached_bytes(m, c.cache, tier, id, part) == expected_bytes(m, tier, id, part));
            }
            c.cache.release(id, tier);
        }
    }
}

TEST_CASE("data is what the file holds, for experts that begin anywhere") {
    moe_model model;
    model.n_embd = 96; // 6144 and 1728 bytes an expert: neither begins nor ends on a block
    for (const uint32_t alignment : { 32, 4096 }) {
        CAPTURE(alignment);
        opened_model m(model, alignment);
        REQUIRE(m.index.locate(tier_id::high, 0, part_id::up, 1).offset % file_reader::alignment != 0);
        check_all_data(m, tier_id::high);
        check_all_data(m, tier_id::low);
    }
}

TEST_CASE("data is what the file holds where types and sizes differ between layers and parts") {
    opened_model m([](gguf_builder & file) {
        file.add("blk.0.ffn_up_exps.weight", GGML_TYPE_Q4_0, 64, 32, 4);
        file.add("blk.0.ffn_down_exps.weight", GGML_TYPE_F32, 32, 64, 4);
        file.add("blk.1.ffn_gate_exps.weight", GGML_TYPE_Q8_0, 64, 96, 6);
        file.add("blk.1.ffn_up_exps.weight", GGML_TYPE_F16, 64, 96, 6);
        file.add("blk.1.ffn_down_exps.weight", GGML_TYPE_Q4_0, 96, 64, 6);
        file.add("blk.2.ffn_gate_up_exps.weight", GGML_TYPE_BF16, 64, 32, 2);
        file.add("blk.2.ffn_down_exps.weight", GGML_TYPE_F32, 16, 64, 2);
    });
    check_all_data(m, tier_id::high);
}

TEST_CASE("a slot is a whole number of blocks with room for the widest layer") {
    moe_model model;
    model.n_embd = 1024; // 65536 and 18432 bytes for each of 3 parts
    opened_model                m(model);
    cache_of<posix_file_reader> c(m);
    for (const auto & [tier, bytes] : { std::pair<tier_id, size_t>{ tier_id::high, 65536 }, { tier_id::low, 18432 } }) {
        const auto classes = c.cache.demand(m.index.layers()).classes[tier];
        REQUIRE(classes.size() == 1);
        const uint64_t size = classes[0].size;
        CHECK(size % file_reader::alignment == 0);
        CHECK(size >= 3 * bytes);
        CHECK(size <= 3 * (bytes + 2 * file_reader::alignment));
    }
}

TEST_CASE("a pinned expert keeps its slot, and acquire fails where all are pinned, changing nothing") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.reader.open_gate();
    c.allocate(tier_id::high, 2);
    const expert_id a     = { 0, 0 };
    const expert_id b     = { 0, 1 };
    const expert_id other = { 1, 3 };

    REQUIRE(c.cache.acquire(a, tier_id::high));
    REQUIRE(c.cache.acquire(a, tier_id::high)); // twice pinned
    REQUIRE(c.cache.acquire(b, tier_id::high));
    c.cache.request(a, tier_id::high, ALL);
    REQUIRE(c.cache.wait(a, tier_id::high, ALL).ok());
    const char * data = c.cache.data(a, tier_id::high, part_id::up);

    CHECK_FALSE(c.cache.acquire(other, tier_id::high));
    CHECK_FALSE(c.cache.holds(other, tier_id::high, {}));
    CHECK(c.cache.holds(a, tier_id::high, ALL));
    CHECK(c.counters.evictions == 0);

    c.cache.release(a, tier_id::high); // still pinned once
    CHECK_FALSE(c.cache.acquire(other, tier_id::high));
    c.cache.release(b, tier_id::high);
    CHECK(c.cache.acquire(other, tier_id::high)); // b leaves, although a is older
    CHECK_FALSE(c.cache.holds(b, tier_id::high, {}));
    CHECK(c.cache.holds(a, tier_id::high, ALL));
    CHECK(c.cache.data(a, tier_id::high, part_id::up) == data);
    CHECK(c.counters.evictions == 1);
}

TEST_CASE("an expert is held once its parts are there or on the way") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.allocate(tier_id::high, 2);
    const expert_id id = { 1, 2 };
    CHECK_FALSE(c.cache.holds(id, tier_id::high, {}));
    REQUIRE(c.cache.acquire(id, tier_id::high));
    CHECK(c.cache.holds(id, tier_id::high, {}));
    CHECK_FALSE(c.cache.holds(id, tier_id::high, UP));
    c.cache.request(id, tier_id::high, UP | GATE);
    CHECK(c.cache.holds(id, tier_id::high, UP | GATE));
    CHECK_FALSE(c.cache.holds(id, tier_id::high, ALL));
    CHECK_FALSE(c.cache.arrived(id, tier_id::high, UP));
    c.reader.open_gate();
    CHECK(c.cache.wait(id, tier_id::high, UP | GATE).ok());
    CHECK(c.cache.arrived(id, tier_id::high, UP | GATE));
    c.cache.release(id, tier_id::high);
    CHECK(c.cache.holds(id, tier_id::high, UP | GATE)); // resident still
}

TEST_CASE("parts are read once while resident, and again after an eviction") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.reader.open_gate();
    c.allocate(tier_id::high, 1);
    c.load({ 0, 0 }, tier_id::high);
    CHECK(c.reader.begun().size() == 3);
    c.load({ 0, 0 }, tier_id::high);
    CHECK(c.reader.begun().size() == 3);
    c.load({ 0, 1 }, tier_id::high);
    CHECK(c.reader.begun().size() == 6);
    CHECK_FALSE(c.cache.holds({ 0, 0 }, tier_id::high, {}));
    c.load({ 0, 0 }, tier_id::high);
    CHECK(c.reader.begun().size() == 9);
    CHECK(c.counters.evictions == 2);
}

TEST_CASE("the tiers have pools of their own") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.reader.open_gate();
    c.allocate(tier_id::high, 1);
    c.allocate(tier_id::low, 2);
    CHECK(c.cache.n_slots(tier_id::high) == 1);
    CHECK(c.cache.n_slots(tier_id::low) == 2);
    c.load({ 0, 0 }, tier_id::high);
    c.load({ 0, 1 }, tier_id::low);
    c.load({ 0, 2 }, tier_id::low);
    CHECK(c.cache.holds({ 0, 0 }, tier_id::high, ALL));
    CHECK_FALSE(c.cache.holds({ 0, 0 }, tier_id::low, {}));
    CHECK(c.counters.evictions == 0);
    c.load({ 0, 1 }, tier_id::high); // in both now
    CHECK(c.cache.holds({ 0, 1 }, tier_id::low, ALL));
    CHECK_FALSE(c.cache.holds({ 0, 0 }, tier_id::high, {}));
    c.cache.acquire({ 0, 2 }, tier_id::low);
    CHECK(c.cache.buffer({ 0, 1 }, tier_id::high, part_id::up) != c.cache.buffer({ 0, 2 }, tier_id::low, part_id::up));
    c.cache.release({ 0, 2 }, tier_id::low);
}

TEST_CASE("an error of reading reaches wait, and everything may be released") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.allocate(tier_id::high, 2);
    const uint64_t at = m.index.locate(tier_id::high, 0, part_id::down, 0).offset;
    c.reader.fail_at(at - at % file_reader::alignment, "the disk is gone");
    c.reader.open_gate();
    REQUIRE(c.cache.acquire({ 0, 0 }, tier_id::high));
    c.cache.request({ 0, 0 }, tier_id::high, ALL);
    CHECK(c.cache.wait({ 0, 0 }, tier_id::high, ALL).message() == "the disk is gone");
    c.cache.release({ 0, 0 }, tier_id::high);
}

TEST_CASE("one expert at a time is uploaded for later, and who loses a slot to it or to a demand is reported") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.allocate(tier_id::high, 2);
    std::vector<std::pair<expert_id, expert_id>> replaced;
    c.cache.set_replacement_listener([&](const expert_tier & newcomer, const expert_tier & victim) {
        replaced.push_back({ newcomer.id, victim.id });
    });
    const expert_id a = { 0, 0 };
    const expert_id b = { 0, 1 };
    const expert_id d = { 1, 0 };
    const expert_id e = { 1, 1 };
    c.reader.let(6);
    c.load(a, tier_id::high);
    c.load(b, tier_id::high);
    CHECK(replaced.empty()); // slots were free
    CHECK_FALSE(c.cache.has_free_slot({ 0, 0 }, tier_id::high));
    REQUIRE(c.cache.upload(d, tier_id::high, ALL));
    CHECK_FALSE(c.cache.upload(e, tier_id::high, ALL)); // the first one is on its way
    CHECK(replaced == std::vector<std::pair<expert_id, expert_id>>{ { d, a } });
    c.reader.open_gate();
    REQUIRE(c.cache.acquire(d, tier_id::high));
    REQUIRE(c.cache.wait(d, tier_id::high, ALL).ok());
    c.cache.release(d, tier_id::high);
    REQUIRE(c.cache.prefetch(e, tier_id::high, ALL)); // for b
    CHECK(replaced.size() == 1);
    REQUIRE(c.cache.acquire(e, tier_id::high));
    REQUIRE(c.cache.wait(e, tier_id::high, ALL).ok());
    c.cache.release(e, tier_id::high);
    c.load(a, tier_id::high);
    CHECK(replaced == std::vector<std::pair<expert_id, expert_id>>{ { d, a }, { a, d } });
    c.cache.set_replacement_listener(nullptr);
}

//
// policy
//

// The highest expert number is worth least.
class scripted_policy final : public cache_policy {
  public:
    double value(expert_id id, tier_id, layer_id) override { return -double(id.expert); }
};

TEST_CASE("the least valuable expert leaves, among those not pinned") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.reader.open_gate();
    c.policy = std::make_unique<scripted_policy>();
    c.allocate(tier_id::high, 3);
    c.load({ 0, 0 }, tier_id::high);
    c.load({ 0, 2 }, tier_id::high);
    REQUIRE(c.cache.acquire({ 0, 3 }, tier_id::high)); // the highest, but pinned
    c.load({ 0, 1 }, tier_id::high);
    CHECK(c.cache.holds({ 0, 0 }, tier_id::high, ALL));
    CHECK_FALSE(c.cache.holds({ 0, 2 }, tier_id::high, {}));
    CHECK(c.cache.holds({ 0, 3 }, tier_id::high, {}));
    CHECK(c.counters.evictions == 1);
}

//
// prefetch
//

// Returns true if the expert's parts begin with the fake reader's bytes at their offset in the file.
static bool holds_what_was_read(const opened_model & m, const expert_cache & cache, expert_id id) {
    for (const part_id part : { part_id::gate, part_id::up, part_id::down }) {
        const uint64_t at = m.index.locate(tier_id::high, id.layer, part, id.expert).offset;
        if (*cache.data(id, tier_id::high, part) != fake_reader::byte_at(at - at % file_reader::alignment)) {
            return false;
        }
    }
    return true;
}

TEST_CASE("what is prefetched is protected until its layer has run, and stays as an ordinary resident") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.reader.open_gate();
    c.allocate(tier_id::high, 2);
    REQUIRE(c.cache.prefetch({ 1, 0 }, tier_id::high, ALL));
    c.load({ 0, 0 }, tier_id::high);
    c.load({ 0, 1 }, tier_id::high); // in the place of 0/0, although 1/0 is older
    CHECK(c.cache.holds({ 1, 0 }, tier_id::high, ALL));
    CHECK_FALSE(c.cache.holds({ 0, 0 }, tier_id::high, {}));
    REQUIRE(c.cache.acquire({ 1, 0 }, tier_id::high));
    REQUIRE(c.cache.wait({ 1, 0 }, tier_id::high, ALL).ok());
    CHECK(holds_what_was_read(m, c.cache, { 1, 0 }));
    c.cache.release({ 1, 0 }, tier_id::high);
    CHECK(c.reader.begun().size() == 9); // nothing was read twice
    c.cache.end_prefetch(1);
    c.load({ 0, 2 }, tier_id::high); // 0/1 is the older one now
    c.load({ 0, 3 }, tier_id::high);
    CHECK_FALSE(c.cache.holds({ 1, 0 }, tier_id::high, {}));
}

TEST_CASE("a prefetch takes no slot from a pinned or protected expert, a demand from a protected one at last") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.reader.open_gate();
    c.allocate(tier_id::high, 2);
    REQUIRE(c.cache.acquire({ 0, 0 }, tier_id::high));
    c.load({ 1, 0 }, tier_id::high);
    c.cache.protect({ 1, 0 }, tier_id::high);
    CHECK_FALSE(c.cache.prefetch({ 1, 1 }, tier_id::high, ALL));
    CHECK(c.counters.evictions == 0);
    CHECK(c.cache.acquire({ 0, 1 }, tier_id::high));
    CHECK_FALSE(c.cache.holds({ 1, 0 }, tier_id::high, {}));
}

TEST_CASE("a demand takes the slot of a prefetch that has not begun, and waits for the one that has") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.allocate(tier_id::high, 1);
    REQUIRE(c.cache.prefetch({ 1, 0 }, tier_id::high, ALL));
    c.reader.wait_begun(1); // its first part is being read, the gate is shut
    c.on_wait = [&] { c.reader.open_gate(); };
    REQUIRE(c.cache.acquire({ 0, 0 }, tier_id::high));
    CHECK_FALSE(c.cache.holds({ 1, 0 }, tier_id::high, {}));
    c.cache.request({ 0, 0 }, tier_id::high, ALL);
    CHECK(c.cache.wait({ 0, 0 }, tier_id::high, ALL).ok());
    CHECK(holds_what_was_read(m, c.cache, { 0, 0 }));
    c.cache.release({ 0, 0 }, tier_id::high);
}

TEST_CASE("what was not read of a prefetch when its layer has run never is, and its slot is free") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.allocate(tier_id::high, 3);
    REQUIRE(c.cache.prefetch({ 1, 0 }, tier_id::high, ALL));
    REQUIRE(c.cache.prefetch({ 1, 1 }, tier_id::high, ALL));
    c.reader.wait_begun(1);
    c.cache.end_prefetch(1);
    CHECK_FALSE(c.cache.holds({ 1, 1 }, tier_id::high, {}));
    c.reader.open_gate();
    c.load({ 0, 0 }, tier_id::high);
    CHECK(c.reader.begun().size() == 4);
    CHECK(c.counters.evictions == 0);
}

TEST_CASE("free slots are filled in order, and the first ones stay longest") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.reader.open_gate();
    c.allocate(tier_id::high, 3);
    c.load({ 0, 3 }, tier_id::high);
    c.cache.fill(tier_id::high, { { 1, 0 }, { 0, 3 }, { 0, 1 }, { 0, 0 } });
    CHECK_FALSE(c.cache.holds({ 0, 0 }, tier_id::high, {})); // no slot is left
    for (const expert_id id : { expert_id{ 1, 0 }, expert_id{ 0, 1 } }) {
        while (!c.cache.arrived(id, tier_id::high, ALL)) {
            std::this_thread::yield();
        }
    }
    CHECK(c.counters.bytes_prefetched > 0);
    CHECK(c.counters.evictions == 0);
    c.load({ 1, 1 }, tier_id::high);
    CHECK_FALSE(c.cache.holds({ 0, 1 }, tier_id::high, {})); // 0/3 was named later than 1/0, before it
    c.load({ 1, 2 }, tier_id::high);
    CHECK_FALSE(c.cache.holds({ 0, 3 }, tier_id::high, {}));
    CHECK(c.cache.holds({ 1, 0 }, tier_id::high, ALL));
}

TEST_CASE("a demand without a free slot ends the filling") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.allocate(tier_id::high, 2);
    c.cache.fill(tier_id::high, { { 1, 0 }, { 1, 1 } });
    c.reader.wait_begun(1); // a part of 1/0, the gate is shut
    c.on_wait = [&] { c.reader.open_gate(); };
    REQUIRE(c.cache.acquire({ 0, 0 }, tier_id::high));
    CHECK_FALSE(c.cache.holds({ 1, 1 }, tier_id::high, ALL));
    c.cache.request({ 0, 0 }, tier_id::high, ALL);
    CHECK(c.cache.wait({ 0, 0 }, tier_id::high, ALL).ok());
    c.cache.release({ 0, 0 }, tier_id::high);
    CHECK(c.cache.acquire({ 1, 1 }, tier_id::high));
}

TEST_CASE("a prefetch that cannot be read is an error of the next demand") {
    opened_model          m;
    cache_of<fake_reader> c(m);
    c.allocate(tier_id::high, 1);
    const uint64_t at = m.index.locate(tier_id::high, 1, part_id::gate, 0).offset;
    c.reader.fail_at(at - at % file_reader::alignment, "the disk is gone");
    REQUIRE(c.cache.prefetch({ 1, 0 }, tier_id::high, ALL));
    c.reader.open_gate();
    while (c.cache.error().ok()) {
        std::this_thread::yield();
    }
    if (c.cache.acquire({ 0, 0 }, tier_id::high)) {
        c.cache.request({ 0, 0 }, tier_id::high, ALL);
        CHECK(c.cache.wait({ 0, 0 }, tier_id::high, ALL).message() == "the disk is gone");
    }
    CHECK(c.cache.error().message() == "the disk is gone");
}

//
// many random uses
//

// Expected content of the cache: residents by last use, and their pins.
struct cache_model {
    size_t             n_slots;
    std::list<int>     residents; // layer * 4 + expert, least recently used first
    std::map<int, int> pins;
    size_t             evictions = 0;

    bool acquire(int id) {
        const auto found = std::find(residents.begin(), residents.end(), id);
        if (found != residents.end()) {
            residents.erase(found);
        } else if (residents.size() == n_slots) {
            const auto victim = std::find_if(residents.begin(), residents.end(), [&](int r) { return pins[r] == 0; });
            if (victim == residents.end()) {
                return false;
            }
            residents.erase(victim);
            evictions++;
        }
        residents.push_back(id);
        pins[id]++;
        return true;
    }
};

TEST_CASE("a random workload leaves the cache as a model of it says") {
    opened_model                m;
    cache_of<posix_file_reader> c(m);
    REQUIRE(c.reader.open(m.index.files()[0]).ok());
    c.allocate(tier_id::low, 4);
    cache_model  model{ 4, {}, {}, 0 };
    std::mt19937 random(3);
    size_t       wrong = 0;
    for (int step = 0; step < 3000; step++) {
        const int       number = int(random() % 8);
        const expert_id id     = { layer_id(number / 4), uint32_t(number % 4) };
        if (random() % 4 && model.pins[number] > 0) {
            c.cache.release(id, tier_id::low);
            model.pins[number]--;
            continue;
        }
        const bool acquired  = c.cache.acquire(id, tier_id::low);
        wrong               += acquired != model.acquire(number);
        if (acquired) {
            c.cache.request(id, tier_id::low, ALL);
            wrong += !c.cache.wait(id, tier_id::low, ALL).ok();
            wrong += cached_bytes(m, c.cache, tier_id::low, id, part_id::down)
                         .compare(expected_bytes(m, tier_id::low, id, part_id::down)) != 0;
        }
        for (int n = 0; n < 8; n++) {
            const bool resident  = std::count(model.residents.begin(), model.residents.end(), n) > 0;
            wrong               += c.cache.holds({ layer_id(n / 4), uint32_t(n % 4) }, tier_id::low, {}) != resident;
        }
        REQUIRE(wrong == 0);
    }
    CHECK(c.counters.evictions == model.evictions);
    CHECK(model.evictions > 100);
}
