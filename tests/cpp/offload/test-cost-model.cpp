// SPDX-License-Identifier: MIT
//
// Simulated runs: durations are those of a machine that is known, no clock is read.
#include "offload/bypass-estimate.h"
#include "offload/cost-model.h"
#include "policy/cache-policy.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <random>
#include <string>

using namespace hobbit;

// What it really takes.
struct machine {
    std::vector<cost_model::kind_seed> kinds;
    double                             transfer_per_byte;
    bool                               one_core  = false; // CPU, device and link take turns
    double                             hand_over = 0.0;   // of an expert that is split

    // Kinds of 8 and 4 bits. `device` is its time for a further token, by the CPU's.
    static machine with_slow_link(double cpu, double device = 0.0) {
        return { { { 8 << 20, 1.0 / 3.0, 0.1e-3 * cpu, 1e-3 * cpu, 0.05e-3, 1e-3 * cpu * device },
                   { 4 << 20, 1.0 / 3.0, 0.1e-3 * cpu, 0.6e-3 * cpu, 0.04e-3, 0.6e-3 * cpu * device } },
                 1.0 / 4e9 };
    }

    cost_model model(compute_mode mode, double cpu_off = 1, double device_off = 1, double link_off = 1) const {
        std::vector<cost_model::kind_seed> seeds = kinds;
        for (cost_model::kind_seed & k : seeds) {
            k.cpu_start        *= cpu_off;
            k.cpu_per_token    *= cpu_off;
            k.device_start     *= device_off;
            k.device_per_token *= device_off;
        }
        return { seeds, transfer_per_byte * link_off, mode };
    }

    std::vector<expert_costs> costs(const std::vector<expert_work> & work) const {
        return model(compute_mode::automatic).costs(work);
    }
};

static constexpr computed_by DEVICE = computed_by::device;
static constexpr computed_by CPU    = computed_by::cpu;
static constexpr computed_by SPLIT  = computed_by::split;

static bool has(const cost_model::placement & p, computed_by by) {
    return std::find(p.by.begin(), p.by.end(), by) != p.by.end();
}

static std::vector<expert_work> random_work(std::mt19937 & random, uint32_t most_tokens) {
    std::vector<expert_work> work;
    for (int e = 0; e < 8; e++) {
        work.push_back({ uint32_t(random() % 2), 1 + uint32_t(random() % most_tokens), random() % 2 == 0 });
    }
    return work;
}

// Computes a layer as it was placed, and tells the model what the machine took.
static double run_placed(const machine & m, cost_model & model, const std::vector<expert_work> & work,
                         const cost_model::placement & p) {
    const std::vector<expert_costs> costs  = m.costs(work);
    double                          cpu    = 0.0;
    double                          device = 0.0;
    double                          link   = 0.0;
    double                          bytes  = 0.0;
    for (size_t i = 0; i < work.size(); i++) {
        const expert_costs & c      = costs[work[i].kind];
        const auto &         k      = m.kinds[work[i].kind];
        const double         there  = p.by[i] == DEVICE ? 1.0 : p.by[i] == SPLIT ? k.down : 0.0;
        cpu                        += (1.0 - there) * c.cpu(work[i].n_tokens);
        device                     += there * (k.device_start + k.device_per_token * work[i].n_tokens);
        if (!work[i].is_present) {
            link  += there * c.transfer;
            bytes += there * double(k.bytes);
        }
    }
    if (cpu > 0.0) {
        model.cpu_took(work, p.by, cpu);
    }
    if (p.measures_device) {
        model.device_took(work, p.by, device);
    }
    if (bytes > 0.0) {
        model.link_took(bytes, link);
    }
    const double together = layer_seconds(costs, work, p.by);
    const double took     = (m.one_core ? cpu + device + link : together) + (has(p, SPLIT) ? m.hand_over : 0.0);
    if (p.measures_layer) {
        model.layer_took(work, p, took);
    }
    return took;
}

static double run_layer(const machine & m, cost_model & model, const std::vector<expert_work> & work,
                        bool may_split = true) {
    return run_placed(m, model, work, model.place(work, may_split));
}

TEST_CASE("estimates that begin ten times off are corrected within 50 tokens") {
    const int n_layers = 16;
    for (const double cpu : { 0.3, 1.0, 5.0 }) { // the CPU is faster than the link, as fast, slower
        for (const double device : { 0.0, 0.5 }) {
            const machine m = machine::with_slow_link(cpu, device);
            for (const uint32_t most_tokens : { 1u, 6u }) {
                for (const double cpu_off : { 0.1, 1.0, 10.0 }) {
                    for (const double device_off : { 0.1, 10.0 }) {
                        for (const double link_off : { 0.1, 1.0, 10.0 }) {
                            CAPTURE(cpu);
                            CAPTURE(device);
                            CAPTURE(most_tokens);
                            CAPTURE(cpu_off);
                            CAPTURE(device_off);
                            CAPTURE(link_off);
                            std::mt19937 random(7);
                            cost_model   model = m.model(compute_mode::automatic, cpu_off, device_off, link_off);
                            for (int i = 0; i < 50 * n_layers; i++) {
                                run_layer(m, model, random_work(random, most_tokens));
                            }
                            double took      = 0.0;
                            double predicted = 0.0;
                            double best      = 0.0;
                            for (int i = 0; i < 10 * n_layers; i++) {
                                const std::vector<expert_work> work    = random_work(random, most_tokens);
                                cost_model                     asked   = model; // place also counts towards trials
                                predicted                             += asked.place(work).seconds;
                                const std::vector<expert_costs> costs  = m.costs(work);
                                best += layer_seconds(costs, work, place_experts(costs, work, true));
                                took += run_layer(m, model, work);
                            }
                            CHECK(took < 1.05 * best);
                            CHECK(predicted == doctest::Approx(took).epsilon(0.1));
                        }
                    }
                }
            }
        }
    }
}

// Where CPU, device and link take turns all the time, what they do to each other has to be tried again and again.
TEST_CASE("automatic is never slower than the better of the other two by more than 5 percent, or 15 on one core") {
    for (const double cpu : { 0.1, 0.5, 2.0, 40.0 }) {
        for (const double device : { 0.0, 0.5 }) {
            for (const bool one_core : { false, true }) {
                CAPTURE(cpu);
                CAPTURE(device);
                CAPTURE(one_core);
                machine m  = machine::with_slow_link(cpu, device);
                m.one_core = one_core;
                double took[3];
                for (const compute_mode mode :
                     { compute_mode::gpu, compute_mode::cooperative, compute_mode::automatic }) {
                    std::mt19937 random(5);
                    cost_model   model = m.model(mode);
                    took[int(mode)]    = 0.0;
                    for (int i = 0; i < 20000; i++) {
                        const std::vector<expert_work> work  = random_work(random, 3);
                        took[int(mode)]                     += run_layer(m, model, work);
                    }
                }
                const double best = std::min(took[int(compute_mode::gpu)], took[int(compute_mode::cooperative)]);
                CHECK(took[int(compute_mode::automatic)] < (one_core ? 1.15 : 1.05) * best);
            }
        }
    }
}

// Experts of one kind, each missing half of the time.
static std::vector<expert_work> half_missing(std::mt19937 & random, int n_experts) {
    std::vector<expert_work> work;
    for (int e = 0; e < n_experts; e++) {
        work.push_back({ 0, 1, random() % 2 == 0 });
    }
    return work;
}

TEST_CASE("an expert is split where that pays, and not where handing over costs more") {
    for (const int n_experts : { 2, 5 }) {
        for (const double hand_over : { 0.0, 3e-3 }) {
            CAPTURE(n_experts);
            CAPTURE(hand_over);
            machine m   = machine::with_slow_link(1.5);
            m.hand_over = hand_over;
            double took[2];
            int    n_split = 0;
            for (const bool may_split : { true, false }) {
                std::mt19937 random(5);
                cost_model   model = m.model(compute_mode::automatic);
                took[may_split]    = 0.0;
                for (int i = 0; i < 20000; i++) {
                    const std::vector<expert_work> work  = half_missing(random, n_experts);
                    n_split                             += has(cost_model(model).place(work, may_split), SPLIT);
                    took[may_split]                     += run_layer(m, model, work, may_split);
                }
            }
            CHECK((n_split > 5000) == (hand_over == 0.0));
            CHECK(n_split < (hand_over == 0.0 ? 20000 : 1000));
            CHECK(took[true] < (hand_over == 0.0 ? 0.95 : 1.03) * took[false]);
        }
    }
}

// A text uses of each layer's experts a few for a while.
struct text {
    static constexpr uint32_t n_layers  = 8;
    static constexpr uint32_t n_experts = 64;
    static constexpr uint32_t n_used    = 4;

    size_t       n_in_use; // of each layer
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
    static constexpr uint32_t brought = 32; // of those that the CPU computes one comes to the device

    const machine &          m;
    cost_model               model;
    cache_policy             policy;
    resident_tiers           pools{ terms_of(tier_kind::complete) };
    bypass_estimate          bypasses{ pools };
    std::vector<expert_term> evicted    = {};
    uint32_t                 n_bypassed = 0;

    simulated_engine(const machine & hardware, compute_mode mode, uint32_t n_slots) :
        m(hardware), model(m.model(mode)) {
        pools.add(term_id::high, resident_set(text::n_layers, text::n_experts, term_id::high, n_slots, 0, policy));
    }

    // Seconds that so many tokens take.
    double run(text & t, uint32_t n_tokens) {
        double took = 0.0;
        for (uint32_t i = 0; i < n_tokens * text::n_layers; i++) {
            const layer_id layer(i % text::n_layers);
            took += run_layer(layer, t.next(layer));
        }
        return took;
    }

    double run_layer(layer_id layer, const std::vector<uint32_t> & experts) {
        std::vector<expert_work>          work;
        std::vector<bypass_estimate::use> uses;
        for (const uint32_t e : experts) {
            const bool is_present = pools.contains({ layer, e }, tier_id::high);
            work.push_back({ 0, 1, is_present });
            uses.push_back({ { { layer, e }, tier_id::high }, !is_present });
        }
        bypasses.begin_layer(layer, uses);
        const cost_model::placement p = model.place(work, true, bypasses.further_misses());
        for (size_t u = 0; u < uses.size(); u++) {
            if (p.by[u] != DEVICE) {
                bypasses.bypassed(uses[u].expert);
            }
            if (p.by[u] == DEVICE || ++n_bypassed % brought == 0) {
                pools.insert(uses[u].expert.id, tier_id::high, layer, evicted);
                pools.touch(uses[u].expert.id, tier_id::high);
            }
        }
        return run_placed(m, model, work, p);
    }
};

TEST_CASE("automatic is as fast as the better of the other two where the CPU's experts do not come to the device") {
    int n_better_gpu = 0;
    for (const double cpu : { 0.5, 0.9, 1.2, 1.7, 3.0 }) { // milliseconds; the link takes 2.1
        for (const uint32_t n_slots : { 32u, 64u, 160u }) {
            for (const text & t : { text{ 12, 0.05 }, text{ 12, 0.5 }, text{ 32, 0.2 } }) {
                CAPTURE(cpu);
                CAPTURE(n_slots);
                CAPTURE(t.n_in_use);
                CAPTURE(t.new_ones);
                const machine m = machine::with_slow_link(cpu);
                double        took[3];
                for (const compute_mode mode :
                     { compute_mode::gpu, compute_mode::cooperative, compute_mode::automatic }) {
                    text own        = t;
                    took[int(mode)] = simulated_engine(m, mode, n_slots).run(own, 1500);
                }
                const double gpu         = took[int(compute_mode::gpu)];
                const double cooperative = took[int(compute_mode::cooperative)];
                CHECK(took[int(compute_mode::automatic)] < 1.05 * std::min(gpu, cooperative));
                n_better_gpu += gpu < cooperative;
            }
        }
    }
    CHECK(n_better_gpu > 10);
    CHECK(n_better_gpu < 35);
}

TEST_CASE("what bypassing costs is learnt anew when the text becomes another one") {
    const machine m     = machine::with_slow_link(1.2);
    const text    few   = { 12, 0.05 };
    const text    many  = { 48, 1.0 };
    const auto    after = [&](const text & first, const text & second) {
        simulated_engine e(m, compute_mode::automatic, 120);
        text             before = first;
        text             then   = second;
        e.run(before, 1000);
        return e.run(then, 1000);
    };
    CHECK(after(few, many) < 1.05 * after(many, many));
    CHECK(after(many, few) < 1.1 * after(few, few)); // which are there when the others have still to come
}

TEST_CASE("the other modes leave nothing to estimates") {
    const machine                  m           = machine::with_slow_link(1.0);
    const std::vector<expert_work> work        = { { 0, 1, true }, { 0, 1, false }, { 1, 90, false } };
    cost_model                     gpu         = m.model(compute_mode::gpu);
    cost_model                     cooperative = m.model(compute_mode::cooperative);
    for (int i = 0; i < 3; i++) {
        CHECK(gpu.place(work).by == placed_experts{ DEVICE, DEVICE, DEVICE });
        CHECK(cooperative.place(work).by == placed_experts{ DEVICE, CPU, CPU });
    }
}

TEST_CASE("a layer that the CPU has no share of, though it could, is told apart") {
    const std::vector<expert_work> missing = { { 0, 1, false }, { 0, 1, true } };
    const std::vector<expert_work> present = { { 0, 1, true }, { 0, 1, true } };
    machine                        m       = machine::with_slow_link(50); // a link that is fast beside this CPU
    for (const compute_mode mode : { compute_mode::gpu, compute_mode::cooperative, compute_mode::automatic }) {
        cost_model model  = m.model(mode);
        int        n_told = 0;
        for (int i = 0; i < 100; i++) {
            CHECK_FALSE(model.place(present).may_use_cpu);
            CHECK_FALSE(model.leave_to_device(missing).may_use_cpu);
            const cost_model::placement p = model.place(missing);
            CHECK(p.may_use_cpu == (mode == compute_mode::automatic && p.by[0] == DEVICE));
            n_told += p.may_use_cpu;
            if (p.by[0] == CPU) { // a trial
                model.cpu_took(missing, p.by, 50e-3);
            }
        }
        CHECK((n_told > 80) == (mode == compute_mode::automatic)); // all but trials
    }
}

TEST_CASE("what is never chosen is tried with one expert, less and less often") {
    const machine                  m     = machine::with_slow_link(1000.0);
    cost_model                     model = m.model(compute_mode::automatic);
    const std::vector<expert_work> work(4, { 0, 1, false });
    std::vector<int>               trials;
    for (int i = 0; i < 1000; i++) {
        const cost_model::placement p = model.place(work);
        const auto                  n = std::count(p.by.begin(), p.by.end(), CPU);
        REQUIRE(n <= 1);
        if (n == 1) {
            trials.push_back(i);
            model.cpu_took(work, p.by, m.costs(work)[0].cpu(1));
        }
    }
    REQUIRE(trials.size() > 5);
    REQUIRE(trials.size() < 15);
    for (size_t i = 2; i < trials.size(); i++) {
        CHECK(trials[i] - trials[i - 1] == 2 * (trials[i - 1] - trials[i - 2]));
    }
}

TEST_CASE("the device's time is asked for in every mode, less and less often, and sooner after a surprise") {
    const machine                  m = machine::with_slow_link(1.0, 0.5);
    const std::vector<expert_work> work(4, { 0, 1, true });
    const placed_experts           by(work.size(), DEVICE);
    const double                   took = 4 * m.costs(work)[0].device;
    for (const compute_mode mode : { compute_mode::gpu, compute_mode::cooperative, compute_mode::automatic }) {
        cost_model model      = m.model(mode);
        const auto next_after = [&](double seconds) {
            model.device_took(work, by, seconds);
            uint32_t n = 1;
            for (; !model.place(work).measures_device; n++) {
            }
            return n;
        };
        for (uint32_t wait = 2; wait <= cost_model::max_device_wait; wait *= 2) {
            CHECK(next_after(took) == wait);
        }
        CHECK(next_after(took) == cost_model::max_device_wait);
        CHECK(next_after(3 * took) == cost_model::max_device_wait / 2);
    }
    const std::vector<expert_work> missing(4, { 0, 1, false });
    for (const compute_mode mode : { compute_mode::gpu, compute_mode::cooperative }) {
        cost_model model = m.model(mode);
        for (int i = 0; i < 3; i++) { // copies are under way, or the CPU has all
            CHECK_FALSE(model.place(missing).measures_device);
        }
        CHECK(model.place(work).measures_device);
        model.discard_device_sample();
        CHECK_FALSE(model.place(work).measures_device);
        CHECK(model.place(work).measures_device);
    }
}
