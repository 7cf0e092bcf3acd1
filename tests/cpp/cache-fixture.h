// SPDX-License-Identifier: MIT
#pragma once

#include "expert-cache.h"
#include "gguf-builder.h"
#include "indifferent-policy.h"
#include "temp-dir.h"

#include <doctest/doctest.h>
#include <functional>
#include <memory>
#include <string>

using namespace hobbit;

static constexpr uint32_t UP   = part_bit(PART_UP);
static constexpr uint32_t GATE = part_bit(PART_GATE);
static constexpr uint32_t DOWN = part_bit(PART_DOWN);
static constexpr uint32_t ALL  = UP | GATE | DOWN;

// A model on disk, opened.
struct opened_model {
    temp_dir     dir;
    gguf_builder file;
    expert_index index;
    std::string  bytes; // of the file

    explicit opened_model(const moe_model & model = {}, uint32_t alignment = 32) : file(alignment) {
        model.add_high(file);
        model.add_low(file);
        open();
    }

    // With what `add` puts into the file.
    explicit opened_model(const std::function<void(gguf_builder &)> & add) {
        add(file);
        open();
    }

    void open() {
        const status s = index.open(file.write(dir.path("m.gguf")), "");
        REQUIRE_MESSAGE(s.ok(), s.message());
        bytes = temp_dir::read(index.files()[0]);
    }
};

// A cache over it.
template <typename reader_type>
struct cache_of {
    opened_model &                model;
    reader_type                   reader;
    stats                         counters;
    std::unique_ptr<cache_policy> policy = std::make_unique<indifferent_policy>();
    std::unique_ptr<loader>       l      = std::make_unique<loader>(reader, counters, 2);
    expert_cache                  cache{ model.index, *l, counters, {} };

    explicit cache_of(opened_model & m) : model(m) {}

    ~cache_of() { l.reset(); } // before the cache, whose memory its threads write into

    void allocate(uint32_t tier, uint32_t n_slots) { REQUIRE(cache.allocate(tier, n_slots, 0, *policy).ok()); }

    // Makes the expert resident, whole, and unpins it.
    void load(expert_id id, uint32_t tier) {
        REQUIRE(cache.acquire(id, tier));
        cache.request(id, tier, ALL);
        CHECK(cache.wait(id, tier, ALL).ok());
        cache.release(id, tier);
    }
};
