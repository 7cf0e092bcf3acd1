// SPDX-License-Identifier: MIT
#include "cache/resident-set.h"

#include "fixtures/one-class.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <vector>

using namespace hobbit;

using pressure = resident_set::pressure;

// Values by table; what is not in it is worth nothing.
class fixed_policy : public cache_policy {
  public:
    double value(expert_id id, tier_id tier, layer_id) override {
        CHECK(tier == tier_id::low); // every set below has this tier
        const auto found = values.find({ id.layer, id.expert });
        return found == values.end() ? 0.0 : found->second;
    }

    std::map<std::pair<layer_id, uint32_t>, double> values;
};

// Admits what has the larger value.
class admitting_policy : public fixed_policy {
  public:
    bool admits(expert_id newcomer, expert_id victim) override {
        return value(newcomer, tier_id::low, 0) > value(victim, tier_id::low, 0);
    }
};

// A set of 3 layers with 4 experts each.
static one_class_set make_set(uint32_t n_slots, cache_policy & policy, uint32_t quota = 0) {
    return one_class_set(3, 4, tier_id::low, n_slots, quota, policy);
}

// Whom the insertion evicts; nothing where it cannot be had or needs nobody's slot.
static std::optional<expert_id> insert(resident_set & set, expert_id id, pressure how = pressure::urgent) {
    expert_id evicted{ layer_id(UINT32_MAX), UINT32_MAX };
    if (!set.insert(id, id.layer, how, &evicted) || evicted.layer == UINT32_MAX) {
        return std::nullopt;
    }
    CHECK_FALSE(set.contains(evicted));
    return evicted;
}

static bool refuses(resident_set & set, expert_id id, pressure how) {
    const auto before = set.residents();
    expert_id  evicted{ 9, 9 };
    const bool refused = !set.insert(id, id.layer, how, &evicted);
    if (refused) {
        CHECK(set.residents() == before);
        CHECK(evicted == expert_id{ 9, 9 });
        CHECK_FALSE(set.contains(id));
    }
    return refused;
}

TEST_CASE("free slots are handed out from the first on, and no expert leaves") {
    fixed_policy  policy;
    one_class_set set = make_set(3, policy);
    for (layer_id i = 0; i < 3; i++) {
        CHECK(insert(set, { i, i }) == std::nullopt);
        CHECK(set.slot({ i, i }) == i);
        CHECK(set.n_residents() == i + 1);
    }
    CHECK(set.contains({ 1, 1 }));
    CHECK_FALSE(set.contains({ 1, 2 }));
    CHECK(set.slot({ 1, 2 }) == resident_set::none);
}

TEST_CASE("the least valuable expert leaves, and the new one gets its slot") {
    fixed_policy policy;
    policy.values     = { { { 0, 0 }, 3.0 }, { { 0, 1 }, 1.0 }, { { 1, 0 }, 2.0 } };
    one_class_set set = make_set(3, policy);
    insert(set, { 0, 0 });
    insert(set, { 0, 1 });
    insert(set, { 1, 0 });
    CHECK(insert(set, { 2, 0 }) == expert_id{ 0, 1 });
    CHECK(set.slot({ 2, 0 }) == 1);
    CHECK(set.slot({ 0, 1 }) == resident_set::none);
    CHECK(set.slot({ 0, 0 }) == 0);
    CHECK(insert(set, { 2, 1 }) == expert_id{ 2, 0 });
    CHECK(insert(set, { 0, 1 }) == expert_id{ 2, 1 });
    CHECK(insert(set, { 2, 2 }) == expert_id{ 0, 1 });
}

TEST_CASE("of equal values the least recently touched leaves") {
    fixed_policy  policy;
    one_class_set set = make_set(3, policy);
    insert(set, { 0, 0 });
    insert(set, { 0, 1 });
    insert(set, { 0, 2 });
    set.touch({ 0, 0 });
    CHECK(insert(set, { 1, 0 }) == expert_id{ 0, 1 });
    CHECK(insert(set, { 1, 1 }) == expert_id{ 0, 2 });
    CHECK(insert(set, { 1, 2 }) == expert_id{ 0, 0 });
    CHECK(insert(set, { 1, 3 }) == expert_id{ 1, 0 }); // insertion touches
}

TEST_CASE("whom the policy refuses a slot gets one where it is urgent") {
    admitting_policy policy;
    policy.values[{ 1, 1 }] = 5.0;
    policy.values[{ 0, 0 }] = 2.0;
    one_class_set set       = make_set(1, policy);
    CHECK(insert(set, { 1, 1 }) == std::nullopt);
    CHECK(refuses(set, { 0, 0 }, pressure::polite));
    CHECK(insert(set, { 0, 0 }) == expert_id{ 1, 1 });
    CHECK(insert(set, { 1, 1 }, pressure::polite) == expert_id{ 0, 0 });
}

TEST_CASE("a pinned expert keeps its slot until each pin is undone") {
    fixed_policy  policy;
    one_class_set set = make_set(2, policy);
    insert(set, { 0, 0 });
    insert(set, { 0, 1 });
    set.pin({ 0, 0 });
    set.pin({ 0, 0 });
    CHECK(insert(set, { 1, 0 }) == expert_id{ 0, 1 });
    set.unpin({ 0, 0 });
    CHECK(set.is_pinned({ 0, 0 }));
    CHECK(insert(set, { 1, 1 }) == expert_id{ 1, 0 });
    set.unpin({ 0, 0 });
    CHECK_FALSE(set.is_pinned({ 0, 0 }));
    CHECK(insert(set, { 1, 2 }) == expert_id{ 0, 0 });
}

TEST_CASE("a protected expert yields to nobody polite, and is the last to yield to the urgent") {
    fixed_policy policy;
    policy.values     = { { { 0, 1 }, 5.0 } };
    one_class_set set = make_set(2, policy);
    insert(set, { 0, 0 });
    insert(set, { 0, 1 });
    set.set_protected({ 0, 0 }, true);
    CHECK(set.is_protected({ 0, 0 }));
    CHECK(insert(set, { 1, 0 }) == expert_id{ 0, 1 }); // though it is worth more
    set.set_protected({ 1, 0 }, true);
    CHECK(refuses(set, { 1, 1 }, pressure::polite));
    CHECK(insert(set, { 1, 1 }, pressure::urgent) == expert_id{ 0, 0 });
    set.set_protected({ 1, 0 }, false);
    set.set_protected({ 1, 1 }, true);
    CHECK(insert(set, { 1, 2 }, pressure::polite) == expert_id{ 1, 0 });
}

TEST_CASE("a duplicate goes first, the most valuable one before others, and keeps no quota") {
    fixed_policy policy;
    policy.values     = { { { 0, 0 }, 1.0 }, { { 0, 1 }, 5.0 }, { { 1, 0 }, 3.0 }, { { 2, 0 }, 0.5 } };
    one_class_set set = make_set(4, policy, 1);
    for (const expert_id id : { expert_id{ 0, 0 }, expert_id{ 0, 1 }, expert_id{ 1, 0 }, expert_id{ 2, 0 } }) {
        insert(set, id);
    }
    set.set_duplicate({ 0, 1 }, true);
    set.set_duplicate({ 1, 0 }, true);
    CHECK(insert(set, { 2, 1 }) == expert_id{ 0, 1 });
    CHECK(insert(set, { 2, 2 }) == expert_id{ 1, 0 }); // the only one of its layer
    CHECK(insert(set, { 0, 1 }) == expert_id{ 2, 1 }); // worth nothing, as 2/2, which came later
    set.set_duplicate({ 0, 0 }, true);
    set.set_duplicate({ 0, 0 }, false);
    CHECK(insert(set, { 0, 3 }) == expert_id{ 2, 2 });
}

TEST_CASE("a layer at its quota loses nothing to another layer, whatever the values") {
    fixed_policy policy;
    policy.values     = { { { 1, 0 }, 7.0 }, { { 1, 1 }, 8.0 }, { { 1, 2 }, 9.0 } };
    one_class_set set = make_set(3, policy, 1);
    insert(set, { 0, 0 });
    insert(set, { 1, 0 });
    insert(set, { 1, 1 });
    CHECK(insert(set, { 1, 2 }) == expert_id{ 1, 0 }); // 0.0 is worth nothing but its layer's only one
    CHECK(insert(set, { 0, 1 }) == expert_id{ 0, 0 }); // from its own layer it is not kept
    CHECK(insert(set, { 2, 0 }) == expert_id{ 1, 1 }); // layer 1 holds two, one more than its quota
    // all three layers are at their quota now: the least valuable but for those of the own layer's, which come first
    CHECK(insert(set, { 2, 1 }) == expert_id{ 2, 0 });
    set.pin({ 2, 1 });
    CHECK(insert(set, { 2, 2 }) == expert_id{ 0, 1 });
}

TEST_CASE("capacity 0 holds nothing, capacity 1 the last one") {
    fixed_policy  policy;
    one_class_set none = make_set(0, policy);
    CHECK(refuses(none, { 0, 0 }, pressure::urgent));
    CHECK(none.n_residents() == 0);

    one_class_set one = make_set(1, policy);
    CHECK(insert(one, { 0, 0 }) == std::nullopt);
    CHECK(insert(one, { 0, 1 }) == expert_id{ 0, 0 });
    CHECK(insert(one, { 2, 3 }) == expert_id{ 0, 1 });
    CHECK(one.residents() == std::vector<expert_id>{ { 2, 3 } });
    CHECK(one.slot({ 2, 3 }) == 0);
}

TEST_CASE("the even quota leaves a layer at work room for all that it uses") {
    CHECK(even_quota(100, 10, 8) == 8); // no more than one token needs
    CHECK(even_quota(80, 10, 8) == 8);  // 9 * 8 + 8
    CHECK(even_quota(79, 10, 8) == 7);
    CHECK(even_quota(50, 10, 8) == 4); // 9 * 5 + 8 would be 53
    CHECK(even_quota(9, 10, 8) == 0);
    CHECK(even_quota(4, 10, 8) == 0);
    CHECK(even_quota(5, 1, 8) == 8);
}

// Runs tokens that take all `n_used` experts of each layer; the hits.
static int count_hits(resident_set & set, int n_tokens, uint32_t n_layers, uint32_t n_used) {
    int hits = 0;
    for (int token = 0; token < n_tokens; token++) {
        for (layer_id layer = 0; layer < n_layers; layer++) {
            std::vector<expert_id> missing;
            for (uint32_t expert = 0; expert < n_used; expert++) {
                const expert_id id{ layer, expert };
                if (set.contains(id)) {
                    hits++;
                    set.touch(id);
                    set.pin(id);
                } else {
                    missing.push_back(id);
                }
            }
            for (const expert_id & id : missing) {
                expert_id evicted;
                REQUIRE(set.insert(id, id.layer, pressure::urgent, &evicted));
                set.pin(id);
            }
            for (uint32_t expert = 0; expert < n_used; expert++) {
                set.unpin({ layer, expert });
            }
        }
    }
    return hits;
}

TEST_CASE("a cycle longer than the pool never hits without quotas, and hits with them") {
    fixed_policy  policy; // least recently touched leaves
    one_class_set without(4, 2, tier_id::low, 5, 0, policy);
    CHECK(count_hits(without, 5, 4, 2) == 0);
    // Floor 1. First token: 0.0 0.1 1.0 1.1 2.0 fill the pool; 2.1 replaces 0.0, 3.0 replaces 1.0 (layer 0 is at its
    // quota), 3.1 replaces 2.0. From then on every layer finds the one that it was left.
    one_class_set with_quota(4, 2, tier_id::low, 5, 1, policy);
    CHECK(count_hits(with_quota, 5, 4, 2) == 16);
}

TEST_CASE("any pool that can keep an expert of every layer hits when a token is repeated") {
    for (uint32_t n_slots = 9; n_slots <= 24; n_slots++) { // 5 * 1 + 4 and more
        CAPTURE(n_slots);
        fixed_policy  policy;
        one_class_set set(6, 4, tier_id::low, n_slots, even_quota(n_slots, 6, 4), policy);
        CHECK(count_hits(set, 4, 6, 4) >= 18); // each layer its quota in each of 3 tokens
    }
}

// The set as its contract reads, by a list in order of touches.
class naive_set {
  public:
    struct entry {
        expert_id id;
        int       pins         = 0;
        bool      is_protected = false;
        bool      is_duplicate = false;
    };

    naive_set(size_t n_slots, uint32_t quota, fixed_policy & policy) :
        n_slots_(n_slots), quota_(quota), policy_(policy) {}

    entry * find(expert_id id) {
        const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const entry & e) { return e.id == id; });
        return found == entries_.end() ? nullptr : &*found;
    }

    void touch(expert_id id) {
        const entry e = *find(id);
        remove(id);
        entries_.push_back(e);
    }

    // Returns false without room; `evicted` is the victim.
    bool insert(expert_id id, pressure how, std::optional<expert_id> & evicted) {
        if (entries_.size() == n_slots_) {
            evicted = victim(id.layer, how);
            if (!evicted) {
                return false;
            }
            remove(*evicted);
        }
        entries_.push_back({ id });
        return true;
    }

    const std::vector<entry> & entries() const { return entries_; }

    size_t n_slots() const { return n_slots_; }

  private:
    std::optional<expert_id> victim(layer_id layer, pressure how) const {
        std::vector<entry> candidates;
        std::copy_if(entries_.begin(), entries_.end(), std::back_inserter(candidates),
                     [&](const entry & e) { return e.pins == 0 && (how == pressure::urgent || !e.is_protected); });
        const auto rank = [&](const entry & e) {
            const auto   in_layer = [&](const entry & other) { return other.id.layer == e.id.layer; };
            const auto   held     = std::count_if(entries_.begin(), entries_.end(), in_layer);
            const double value    = policy_.value(e.id, tier_id::low, layer);
            const bool   keeps    = e.id.layer != layer && held <= quota_ && !e.is_duplicate;
            return std::make_tuple(e.is_protected, !e.is_duplicate, keeps, e.is_duplicate ? -value : value);
        };
        // the last one touched among equal duplicates
        std::stable_partition(candidates.begin(), candidates.end(), [](const entry & e) { return !e.is_duplicate; });
        std::reverse(std::find_if(candidates.begin(), candidates.end(), [](const entry & e) { return e.is_duplicate; }),
                     candidates.end());
        std::stable_sort(candidates.begin(), candidates.end(),
                         [&](const entry & a, const entry & b) { return rank(a) < rank(b); });
        return candidates.empty() ? std::nullopt : std::optional<expert_id>(candidates.front().id);
    }

    void remove(expert_id id) { entries_.erase(entries_.begin() + (find(id) - entries_.data())); }

    const size_t       n_slots_;
    const long         quota_;
    fixed_policy &     policy_;
    std::vector<entry> entries_; // least recently touched first
};

static void check_same(const resident_set & set, naive_set & naive) {
    REQUIRE(set.n_residents() == naive.entries().size());
    REQUIRE(set.residents().size() == set.n_residents());
    std::set<uint32_t> slots;
    for (const auto & e : naive.entries()) {
        REQUIRE(set.contains(e.id));
        CHECK(set.is_pinned(e.id) == (e.pins > 0));
        CHECK(set.is_protected(e.id) == e.is_protected);
        CHECK(set.slot(e.id) < naive.n_slots());
        slots.insert(set.slot(e.id));
    }
    CHECK(slots.size() == set.n_residents());
}

// One random operation on both sets.
static void operate(resident_set & set, naive_set & naive, expert_id id, std::mt19937 & random) {
    naive_set::entry * resident = naive.find(id);
    if (!resident) {
        const pressure           how = random() % 2 ? pressure::polite : pressure::urgent;
        std::optional<expert_id> expected;
        expert_id                evicted{ 9, 9 };
        const bool               fits = naive.insert(id, how, expected);
        if (expected) {
            CHECK_FALSE(set.is_pinned(*expected));
        }
        CHECK(set.insert(id, id.layer, how, &evicted) == fits);
        CHECK(evicted == expected.value_or(expert_id{ 9, 9 }));
        return;
    }
    switch (random() % 5) {
        case 0:
            set.touch(id);
            naive.touch(id);
            break;
        case 1:
            if (resident->pins > 0) {
                set.unpin(id);
                resident->pins--;
            }
            break;
        case 2:
            set.pin(id);
            resident->pins++;
            break;
        case 3:
            resident->is_duplicate = random() % 2;
            set.set_duplicate(id, resident->is_duplicate);
            break;
        default: resident->is_protected = random() % 3 == 0; set.set_protected(id, resident->is_protected);
    }
}

TEST_CASE("random operations: as the contract reads, and no pinned expert ever leaves or changes its slot") {
    std::mt19937 random(3);
    for (int round = 0; round < 60; round++) {
        const uint32_t n_layers  = 1 + random() % 4;
        const uint32_t n_experts = 1 + random() % 6;
        const uint32_t n_slots   = random() % 9;
        const uint32_t quota     = random() % 4;
        CAPTURE(round);
        fixed_policy  policy;
        one_class_set set(n_layers, n_experts, tier_id::low, n_slots, quota, policy);
        naive_set     naive(n_slots, quota, policy);

        std::map<std::pair<layer_id, uint32_t>, uint32_t> pinned; // slots
        for (int step = 0; step < 300; step++) {
            const expert_id id{ layer_id(random() % n_layers), uint32_t(random() % n_experts) };
            policy.values[{ id.layer, id.expert }] = double(random() % 4);
            operate(set, naive, id, random);
            check_same(set, naive);
            for (const auto & [key, slot] : pinned) {
                CHECK(set.slot({ key.first, key.second }) == slot);
            }
            pinned.clear();
            for (const auto & e : naive.entries()) {
                if (e.pins > 0) {
                    pinned[{ e.id.layer, e.id.expert }] = set.slot(e.id);
                }
            }
        }
    }
}

TEST_CASE("each class of layers has slots of its own") {
    fixed_policy policy;
    resident_set set({ 1, 0, 1 }, 4, tier_id::low, { 1, 2 }, { { 2, 4, 1 }, { 1, 8, 2 } }, 0, policy);
    CHECK(insert(set, { 0, 0 }) == std::nullopt);
    CHECK(insert(set, { 1, 0 }) == std::nullopt);
    CHECK_FALSE(set.has_free_slot(1));
    CHECK(insert(set, { 2, 0 }) == std::nullopt);
    CHECK(set.slot({ 1, 0 }) == 0);
    CHECK(set.slot({ 2, 0 }) == 1);
    CHECK(insert(set, { 1, 1 }) == expert_id{ 1, 0 }); // though 0.0 was touched before
    CHECK(insert(set, { 2, 1 }) == expert_id{ 0, 0 });
    set.pin({ 1, 1 });
    CHECK(refuses(set, { 1, 2 }, pressure::urgent));
    set.erase({ 2, 1 });
    CHECK(set.has_free_slot(0));
    CHECK_FALSE(set.has_free_slot(1));
    CHECK(insert(set, { 0, 3 }) == std::nullopt);
}
