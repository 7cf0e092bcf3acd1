// SPDX-License-Identifier: MIT
// A layer's rows that are computed before the layer runs. The device is the CPU behind ggml's RPC server.
#include "fixtures/executor-fixture.h"
#include "fixtures/rpc-device.h"
#include "predict/predictor.h"

#include <utility>
#include <vector>

namespace {

// Refuses what no token demands.
class guarding_policy : public cache_policy {
  public:
    explicit guarding_policy(const policy_options &) {}

    bool admits(expert_id, expert_id) override { return false; }
};

const auto guard = registered_policy::of<guarding_policy>("guard");

} // namespace

namespace {

// Predicts the same experts for every layer.
struct fixed_predictor : predictor {
    std::vector<int32_t> experts;

    explicit fixed_predictor(std::vector<int32_t> e) : experts(std::move(e)) {}

    status predict(const layer_routing &        running, uint32_t, const ggml_tensor *, ggml_backend_t,
                   std::vector<layer_routing> & predictions) override {
        predictions = { { layer_id(running.layer + 1), 1, 2, experts, { 0.5f, 0.5f } } };
        return {};
    }
};

void add_early(engine & e, const model_on_disk & m, predictor & ahead, double from = 0.0) {
    static std::map<double, setting_values> all; // outlive the hooks
    setting_values &                        values = all[from];
    CHECK(values.set("hobbit.early", 1.0, HOBBIT_SOURCE_GIVEN).ok());
    CHECK(values.set("hobbit.early_from", from, HOBBIT_SOURCE_GIVEN).ok());
    e.executor.add(make_hooks({ "", values, m.index, e.counters, e.cache, e.host.get(), &ahead, e.share.get() }));
}

// Computes one token of two layers in an engine, the second with its own input.
rows compute_both(engine & e, const model_on_disk & m, const layer_input & first, const layer_input & second) {
    e.compute(m, first, 0);
    return e.compute(m, second, 1);
}

rules guarded() {
    rules config;
    config.policy = "guard"; // uploads nothing once the pool is full
    return config;
}

// Two layers of a token, of which the second's predicted experts are in host memory alone.
struct two_layers {
    const model_on_disk m;
    const layer_input   first  = random_input(m.shape, 1, 1);
    const layer_input   second = random_input(m.shape, 1, 2);
    fixed_predictor     ahead{ { second.ids[0], second.ids[0] == 7 ? 6 : 7 } };
    engine              e{ m, 1, 0, guarded(), { rpc_device() }, 16, compute_mode::cooperative };

    explicit two_layers(double from = 0.0) {
        e.compute(m, random_input(m.shape, 1, 3), 0); // fills the pool
        add_early(e, m, ahead, from);
        e.knows_router_input = true;
    }

    rows compute() { return compute_both(e, m, first, second); }

    uint64_t n_early() { return e.counters.of("selections_early"); }
};

} // namespace

TEST_CASE("predicted experts that host memory alone has are computed on the layer before's input") {
    two_layers two;
    const rows exact = two.compute(); // the layers are not known yet
    CHECK(exact == stock(two.m, two.second, tier_id::high, 1));
    CHECK(two.n_early() == 0);
    const rows found = two.compute();
    CHECK(two.n_early() == 1);
    layer_input stale = two.second;
    stale.x           = two.first.x;
    CHECK(found[0] == stock(two.m, stale, tier_id::high, 1)[0]);
    CHECK(found[1] == exact[1]);
}

TEST_CASE("layers before the first one are exact") {
    two_layers two(2.0);
    for (int i = 0; i < 2; i++) {
        CHECK(two.compute() == stock(two.m, two.second, tier_id::high, 1));
    }
    CHECK(two.n_early() == 0);
}

TEST_CASE("experts that read another tensor than their router are exact") {
    two_layers two;
    two.e.has_own_input = true;
    for (int i = 0; i < 3; i++) {
        CHECK(two.compute() == stock(two.m, two.second, tier_id::high, 1));
    }
    CHECK(two.n_early() == 0);
}

TEST_CASE("batches of several tokens are exact, and nothing is computed early for them") {
    const model_on_disk m;
    const layer_input   first  = random_input(m.shape, 2, 1);
    const layer_input   second = random_input(m.shape, 2, 2);
    fixed_predictor     ahead({ 0, 1 });
    engine              e{ m, 3, 0, {}, { rpc_device() }, 16, compute_mode::cooperative };
    add_early(e, m, ahead);
    e.knows_router_input = true;
    for (int i = 0; i < 3; i++) {
        CHECK(compute_both(e, m, first, second) == stock(m, second, tier_id::high, 1));
    }
    CHECK(e.counters.of("selections_early") == 0);
}

// Passes that are set by hand.
class passes_by_hand final : public batch_passes {
  public:
    status check(const rule_numbers &, bool, const std::string &) const override { return {}; }
    void   begin(batch_info &, sequence_thresholds &, bool) override {}
    void   keep(const layer_routing &, const layer_plan &, const step_counts &) override {}
    bool   is_new(const layer_routing &, int32_t, precision) const override { return false; }
    bool   repeats(batch_info &, sequence_thresholds &, const float *, size_t, stats &) override { return false; }
};

TEST_CASE("a second pass is exact, and asks no predictor that has not heard of it") {
    two_layers     two;
    passes_by_hand passes;
    two.e.run.passes = &passes;
    two.compute();
    two.e.run.batch.set_pass(batch_pass::draft);
    two.compute();
    CHECK(two.n_early() == 1);
    two.e.run.batch.set_pass(batch_pass::second);
    CHECK(two.compute() == stock(two.m, two.second, tier_id::high, 1));
    CHECK(two.n_early() == 1);
}

TEST_CASE("a token that chooses an expert twice, as by a table of experts, gets its rows") {
    two_layers  two;
    layer_input twice = two.second;
    twice.ids[1]      = twice.ids[0];
    compute_both(two.e, two.m, two.first, twice); // the layers are not known yet
    const rows found = compute_both(two.e, two.m, two.first, twice);
    CHECK(two.n_early() == 1);
    twice.x = two.first.x;
    CHECK(found == stock(two.m, twice, tier_id::high, 1));
}
