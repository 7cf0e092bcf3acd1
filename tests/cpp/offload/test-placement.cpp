// SPDX-License-Identifier: MIT
//
// The rule's decisions, by hand, and simulated runs: durations are those of a machine that is known, no clock is read.
#include "offload/placement.h"

#include "fixtures/one-class.h"
#include "policy/cache-policy.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <random>

using namespace hobbit;

static const cpu_experts NONE = { false };
static const cpu_experts CPU  = { true };

static const std::vector<expert_work> ONE     = { { 1000, 1, false } };
static const std::vector<expert_work> PRESENT = { { 1000, 1, true } };

// An expert takes so long on the CPU, on the device and on the link.
static placement with(double cpu, double device, double upload, compute_mode mode = compute_mode::automatic) {
    placement p(0.25, mode);
    p.cpu_took(ONE, CPU, cpu);
    p.device_took(PRESENT, NONE, device);
    p.link_took(2000, 2.0 * upload);
    return p;
}

// Uploads that serve so many further uses each.
static void add_uploads(placement & p, uint32_t further_uses) {
    for (uint32_t i = 0; i < 300; i++) {
        p.gain().replaced({ { 0, i }, tier_id::high }, { { 1, i }, tier_id::high });
        for (uint32_t n = 0; n < further_uses; n++) {
            p.gain().used({ { 0, i }, tier_id::high });
        }
    }
}

TEST_CASE("the CPU computes a missing expert where it takes no longer than upload and device") {
    CHECK(with(1.0, 0.25, 1.0).place(ONE, 1) == CPU);
    CHECK(with(1.25, 0.25, 1.0).place(ONE, 1) == CPU);
    CHECK(with(1.5, 0.25, 1.0).place(ONE, 1) == NONE);
    CHECK(with(1.0, 0.25, 1.0).place(PRESENT, 1) == NONE);
}

TEST_CASE("a share of an upload's further hits counts, as the CPU's time less the device's") {
    for (const uint32_t uses : { 5u, 6u }) { // 1.2 + 0.825 and 1.2 + 0.99 beside 2.1
        placement p = with(1.2, 0.1, 2.0);
        add_uploads(p, uses);
        CHECK(p.place(ONE, 1) == (uses == 5 ? CPU : NONE));
    }
    placement slow_device = with(1.2, 1.2, 2.0);
    add_uploads(slow_device, 100);
    CHECK(slow_device.place(ONE, 1) == CPU);
}

TEST_CASE("each expert is placed by its own size and rows, all of a layer by the same rule") {
    placement p(0.25, compute_mode::automatic);
    p.cpu_took({ { 1000, 1, false } }, CPU, 2.0);
    p.cpu_took({ { 1000, 8, false } }, CPU, 4.0);
    p.cpu_took({ { 4000, 1, false } }, CPU, 2.0);
    p.link_took(1000, 3.0);
    const std::vector<expert_work> work = { { 1000, 1, false }, { 1000, 8, false }, { 1000, 1, true },
                                            { 4000, 4, false }, { 4000, 8, false }, { 1000, 1, false } };
    CHECK(p.place(work, 1) == cpu_experts{ true, false, false, true, false, true }); // 2, 4 by 3; 8, 16 by 12
}

TEST_CASE("CPU and link share a layer's missing experts, so that both end together") {
    const std::vector<expert_work> eight(8, { 1000, 1, false });
    const auto                     n_on_cpu = [&](double cpu, double upload, compute_mode mode) {
        const cpu_experts by = with(cpu, 0.1, upload, mode).place(eight, 1);
        return std::count(by.begin(), by.end(), true);
    };
    CHECK(n_on_cpu(1.0, 1.0, compute_mode::automatic) == 4);
    CHECK(n_on_cpu(1.0, 3.0, compute_mode::automatic) == 6);
    CHECK(n_on_cpu(3.0, 1.0, compute_mode::automatic) == 2);
    CHECK(n_on_cpu(1.0, 9.0, compute_mode::automatic) == 8);
    CHECK(n_on_cpu(1.0, 3.0, compute_mode::twiddler) == 8); // each expert by itself
    const std::vector<expert_work> mixed = { { 1000, 1, false }, { 1000, 1, true }, { 1000, 1, false } };
    CHECK(with(1.0, 0.1, 1.5).place(mixed, 1) == cpu_experts{ true, false, false });
}

TEST_CASE("an upload costs a launch more, which takes as long as the hits, where the device has run ahead") {
    const std::vector<expert_work> work = {
        { 1000, 1, false }, { 1000, 1, true }, { 1000, 1, true }, { 1000, 1, true }
    };
    placement p = with(1.5, 0.25, 1.0); // beside 1.25, or 2.0
    CHECK_FALSE(p.place(work, 1, false)[0]);
    CHECK(p.place(work, 1, true)[0]);
    CHECK_FALSE(with(1.5, 0.25, 1.0, compute_mode::twiddler).place(work, 1, true)[0]);
}

TEST_CASE("without samples the CPU computes, and its first sample counts") {
    placement p(0.25, compute_mode::automatic);
    CHECK(p.place(ONE, 1) == CPU);
    p.cpu_took(ONE, CPU, 1.0);
    p.link_took(1000, 0.5);
    CHECK(p.place(ONE, 1) == NONE);
}

TEST_CASE("gpu leaves everything to the device, cooperative what is there and prompts") {
    const std::vector<expert_work> work        = { { 1000, 1, true }, { 1000, 90, false } };
    placement                      gpu         = with(0.0, 1.0, 1.0, compute_mode::gpu);
    placement                      cooperative = with(9.0, 0.0, 0.0, compute_mode::cooperative);
    CHECK(gpu.place(work, 1) == cpu_experts{ false, false });
    CHECK(cooperative.place(work, 1) == cpu_experts{ false, true });
    CHECK(cooperative.place(work, 16) == cpu_experts{ false, true });
    CHECK(cooperative.place(work, 17) == cpu_experts{ false, false });
    CHECK(with(1.0, 0.25, 1.0).place(ONE, 17) == CPU); // the rule places a prompt's experts too
}

TEST_CASE("twiddler compares an expert's own times alone, and uploads nothing in the background") {
    placement p = with(1.2, 0.1, 2.0, compute_mode::twiddler);
    add_uploads(p, 100);
    CHECK(p.place(ONE, 1) == CPU); // auto uploads it, for its further uses
    CHECK(p.place(PRESENT, 1) == NONE);
    CHECK(p.place({ { 1000, 2, false } }, 1) == NONE); // 2.4 beside 2.2
    CHECK_FALSE(p.may_upload());
}

TEST_CASE("latencies are listed for what was measured") {
    placement p(0.25, compute_mode::twiddler);
    CHECK(p.latencies().empty());
    p.cpu_took({ { 4000, 5, false } }, CPU, 2.0);
    p.device_took(PRESENT, NONE, 0.5);
    p.link_took(1000, 3.0);
    const auto found = p.latencies();
    REQUIRE(found.size() == 2);
    CHECK((found[0].expert_bytes == 1000 && found[0].n_tokens == 1));
    CHECK((found[0].cpu_s == 0.0 && found[0].device_s == 0.5 && found[0].upload_s == doctest::Approx(3.0)));
    CHECK((found[1].expert_bytes == 4000 && found[1].n_tokens == 4));
    CHECK((found[1].cpu_s == 2.0 && found[1].device_s == 0.0 && found[1].upload_s == doctest::Approx(12.0)));
}

TEST_CASE("a CPU that is not used is measured again with one expert, after 1024 others") {
    placement                      p = with(9.0, 0.0, 1.0);
    const std::vector<expert_work> two(2, { 1000, 1, false });
    for (int i = 0; i < 511; i++) {
        CHECK(p.place(two, 1) == cpu_experts{ false, false });
    }
    CHECK(p.place(two, 1) == cpu_experts{ false, true });
    p.cpu_took(two, { false, true }, 0.5); // it has become faster
    CHECK(p.place(two, 1) == cpu_experts{ true, true });
}

TEST_CASE("the device is measured once in 64 layers without uploads that it has a part of") {
    placement                      p    = with(1.0, 0.0, 2.0);
    const std::vector<expert_work> both = { { 1000, 1, true }, { 1000, 1, false } };
    int                            n    = 0;
    for (int i = 0; i < 128; i++) {
        p.place(ONE, 1);
        CHECK_FALSE(p.measures_device());
        p.place(both, 1);
        n += p.measures_device();
    }
    CHECK(n == 2);
    placement uploads = with(9.0, 0.0, 1.0);
    uploads.place(both, 1);
    CHECK_FALSE(uploads.measures_device());
}

TEST_CASE("background uploads take a quarter of the time") {
    placement p = with(1.0, 0.0, 2.0);
    CHECK(p.may_upload());
    p.begin_upload(1000);
    p.pass(7.9);
    CHECK_FALSE(p.may_upload());
    p.pass(0.1);
    CHECK(p.may_upload());
    p.pass(1000.0); // is not saved up
    p.begin_upload(1000);
    CHECK_FALSE(p.may_upload());
}

//
// simulated runs
//

// True times of an expert of 8 MiB, and of one of 4 MiB. A core that computes and copies at once is slower at both.
struct machine {
    double cpu;              // milliseconds for a token of the larger one
    double device   = 0.0;   // time of a further token, divided by the CPU's
    bool   one_core = false; // CPU, device and link take turns

    static constexpr double per_byte = 1.0 / 4e9;
    static constexpr size_t bytes[2] = { 8 << 20, 4 << 20 };

    placement rule(compute_mode mode) const { return { 0.25, mode }; }

    static bool is_small(const expert_work & w) { return w.bytes == bytes[1]; }

    double on_cpu(const expert_work & w) const { return cpu * (0.1e-3 + (is_small(w) ? 0.6e-3 : 1e-3) * w.n_rows); }

    double on_device(const expert_work & w) const {
        return is_small(w) ? 0.04e-3 + 0.6e-3 * cpu * device * w.n_rows : 0.05e-3 + 1e-3 * cpu * device * w.n_rows;
    }

    // Computes a layer as it was placed, and tells the rule what it took.
    double run(placement & rule, const std::vector<expert_work> & work, const cpu_experts & by) const {
        double here  = 0.0;
        double there = 0.0;
        double link  = 0.0;
        double last  = 0.0; // uploaded, and then to be computed
        for (size_t i = 0; i < work.size(); i++) {
            const expert_work & w  = work[i];
            here                  += by[i] ? on_cpu(w) : 0.0;
            there                 += by[i] ? 0.0 : on_device(w);
            if (!by[i] && !w.is_present) {
                link += double(w.bytes) * per_byte;
                last  = std::max(last, on_device(w));
            }
        }
        const double beside = one_core ? std::min(here, link) : 0.0;
        if (here > 0.0) {
            rule.cpu_took(work, by, here + beside);
        }
        if (rule.measures_device()) {
            rule.device_took(work, by, there);
        }
        if (link > 0.0) {
            rule.link_took(link / per_byte, link + beside);
        }
        const double took = one_core ? here + there + link : std::max({ here, there, link + last });
        rule.pass(took);
        return took;
    }
};

static constexpr compute_mode MODES[] = { compute_mode::gpu, compute_mode::cooperative, compute_mode::automatic };

TEST_CASE("automatic is within 10 percent of the better of the other two where hits are given") {
    for (const double cpu : { 0.1, 0.5, 2.0, 40.0 }) {
        for (const double device : { 0.0, 0.5 }) {
            for (const bool one_core : { false, true }) {
                CAPTURE(cpu);
                CAPTURE(device);
                CAPTURE(one_core);
                const machine m = { cpu, device, one_core };
                double        took[3];
                for (const compute_mode mode : MODES) {
                    std::mt19937 random(5);
                    placement    rule = m.rule(mode);
                    rule.link_took(1e9, 1e9 * machine::per_byte); // by background uploads
                    took[int(mode)] = 0.0;
                    for (int i = 0; i < 20000; i++) {
                        std::vector<expert_work> work;
                        for (int e = 0; e < 8; e++) {
                            work.push_back(
                                { machine::bytes[random() % 2], 1 + uint32_t(random() % 3), random() % 2 == 0 });
                        }
                        took[int(mode)] += m.run(rule, work, rule.place(work, 3));
                    }
                }
                const double best = std::min(took[int(compute_mode::gpu)], took[int(compute_mode::cooperative)]);
                CHECK(took[int(compute_mode::automatic)] < 1.1 * best);
            }
        }
    }
}

// A text uses of each layer's experts a few for a while.
struct text {
    static constexpr uint32_t n_layers  = 8;
    static constexpr uint32_t n_experts = 64;
    static constexpr uint32_t n_used    = 4;

    size_t       n_in_use; // experts in use, per layer
    double       new_ones; // per layer and token
    std::mt19937 random{ 11 };

    std::vector<std::vector<uint32_t>> in_use{ n_layers }; // [layer]

    std::vector<uint32_t> next(layer_id layer) {
        std::vector<uint32_t> & experts = in_use[layer];
        for (uint32_t e = 0; experts.size() < n_in_use; e++) {
            experts.push_back(e);
        }
        experts.resize(n_in_use);
        std::shuffle(experts.begin(), experts.end(), random);
        const uint32_t other = uint32_t(random() % n_experts);
        if (double(random() % 1000) < 1000.0 * new_ones &&
            std::find(experts.begin(), experts.end(), other) == experts.end()) {
            experts.back() = other;
        }
        return { experts.begin(), experts.begin() + n_used };
    }
};

// The device's pool, and what places experts there or elsewhere.
struct simulated_engine {
    const machine & m;
    placement       rule;
    const bool      counts_hits;
    cache_policy    policy;
    one_class_set   pool;

    simulated_engine(const machine & hardware, compute_mode mode, uint32_t n_slots, bool counts_further_hits = true) :
        m(hardware),
        rule(m.rule(mode)),
        counts_hits(counts_further_hits),
        pool(text::n_layers, text::n_experts, tier_id::high, n_slots, 0, policy) {}

    // Seconds that so many tokens take.
    double run(text & t, uint32_t n_tokens) {
        double took = 0.0;
        for (uint32_t i = 0; i < n_tokens * text::n_layers; i++) {
            const layer_id layer(i % text::n_layers);
            took += run_layer(layer, t.next(layer));
        }
        return took;
    }

    void insert(const expert_id & id) {
        expert_id  victim;
        const bool evicts = !pool.has_free_slot(id.layer);
        if (pool.contains(id) || !pool.insert(id, id.layer, resident_set::pressure::urgent, &victim)) {
            return;
        }
        if (evicts && counts_hits) {
            rule.gain().replaced({ id, tier_id::high }, { victim, tier_id::high });
        }
    }

    double run_layer(layer_id layer, const std::vector<uint32_t> & experts) {
        std::vector<expert_work> work;
        for (const uint32_t e : experts) {
            work.push_back({ machine::bytes[0], 1, pool.contains({ layer, e }) });
            rule.gain().used({ { layer, e }, tier_id::high });
        }
        const cpu_experts by   = rule.place(work, 1);
        const double      took = m.run(rule, work, by);
        for (size_t i = 0; i < experts.size(); i++) {
            if (!by[i] && !work[i].is_present) {
                insert({ layer, experts[i] });
            }
        }
        for (size_t i = 0; i < experts.size(); i++) {
            if (by[i]) {
                upload({ layer, experts[i] });
            } else if (pool.contains({ layer, experts[i] })) {
                pool.touch({ layer, experts[i] });
            }
        }
        return took;
    }

    // Uploads in the background.
    void upload(const expert_id & id) {
        const bool is_free = pool.has_free_slot(id.layer);
        if (is_free || rule.may_upload()) {
            insert(id);
            if (!is_free) {
                rule.begin_upload(machine::bytes[0]);
            }
            rule.link_took(double(machine::bytes[0]), double(machine::bytes[0]) * machine::per_byte);
        }
    }
};

TEST_CASE("automatic is within 10 percent of the better of the other two where uploads serve later tokens") {
    int n_better_gpu = 0;
    for (const double cpu : { 0.5, 0.9, 1.2, 1.7, 3.0 }) { // milliseconds; the link takes 2.1
        for (const uint32_t n_slots : { 32u, 64u, 160u }) {
            for (const text & t : { text{ 12, 0.05 }, text{ 12, 0.5 }, text{ 32, 0.2 } }) {
                CAPTURE(cpu);
                CAPTURE(n_slots);
                CAPTURE(t.n_in_use);
                CAPTURE(t.new_ones);
                const machine m = { cpu };
                double        took[3];
                for (const compute_mode mode : MODES) {
                    text own        = t;
                    took[int(mode)] = simulated_engine(m, mode, n_slots).run(own, 1500);
                }
                const double gpu         = took[int(compute_mode::gpu)];
                const double cooperative = took[int(compute_mode::cooperative)];
                CHECK(took[int(compute_mode::automatic)] < 1.1 * std::min(gpu, cooperative));
                n_better_gpu += gpu < cooperative;
            }
        }
    }
    CHECK(n_better_gpu > 10);
    CHECK(n_better_gpu < 35);
}

TEST_CASE("without the further hits automatic would take 1.4 times as long as gpu if a text stays with its experts") {
    const machine m     = { 1.7 };
    const auto    after = [&](compute_mode mode, bool counts_hits) {
        text t = { 12, 0.5 };
        return simulated_engine(m, mode, 160, counts_hits).run(t, 1500);
    };
    const double gpu = after(compute_mode::gpu, true);
    CHECK(after(compute_mode::automatic, false) > 1.4 * gpu);
    CHECK(after(compute_mode::automatic, true) < 1.1 * gpu);
}

TEST_CASE("what an upload gains is learnt anew when the text becomes another one") {
    const machine m     = { 1.2 };
    const text    few   = { 12, 0.05 };
    const text    many  = { 48, 1.0 };
    const auto    after = [&](const text & first, const text & second) {
        simulated_engine e(m, compute_mode::automatic, 120);
        text             before = first;
        text             then   = second;
        e.run(before, 1000);
        return e.run(then, 1000);
    };
    CHECK(after(few, many) < 1.1 * after(many, many));
    CHECK(after(many, few) < 1.15 * after(few, few)); // the first uploads need 0.09 of it
}
