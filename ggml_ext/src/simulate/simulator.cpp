// SPDX-License-Identifier: MIT
#include "base/status.h"
#include "cache/resident-set.h"
#include "engine/settings.h"
#include "hobbit-simulation.h"
#include "model/calibration.h"
#include "plan/layer-plan.h"
#include "plan/memory-budget.h"
#include "policy/cache-policy.h"
#include "predict/predictor.h"
#include "simulate/route-batches.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace hobbit {

//
// options
//

static status read_costs(const hobbit_simulation & options, const settings & given, precision_costs & costs) {
    if (!registered_rule::traits(given.rule()).needs_costs || given.thresholds().all_high()) {
        return {};
    }
    if (!options.low_costs || !options.skip_costs) {
        return status::error("a price belongs to the rules price and edgemoe, which need the costs of a calibration");
    }
    const size_t n = size_t(options.n_costs);
    return costs.set({ options.low_costs, options.low_costs + n }, { options.skip_costs, options.skip_costs + n },
                     options.n_layers, options.n_experts);
}

// [layer] bytes of an expert. The bound counts all alike.
static std::vector<uint64_t> sizes_of(const hobbit_simulation & options, tier_id tier) {
    std::vector<uint64_t> sizes(options.n_layers, 1 << 20);
    if (options.expert_bytes && !options.belady) {
        sizes.assign(options.expert_bytes, options.expert_bytes + options.n_layers);
    }
    if (tier == tier_id::low) {
        const double mean = std::accumulate(sizes.begin(), sizes.end(), 0.0) / options.n_layers;
        sizes.assign(options.n_layers, uint64_t(std::nearbyint(options.bits_low / options.bits_high * mean)));
    }
    return sizes;
}

static pool_demand demand_of(const hobbit_simulation & options) {
    pool_demand demand;
    demand.n_used = options.n_used;
    for (const tier_id tier : TIERS) {
        const std::vector<uint64_t> sizes   = sizes_of(options, tier);
        const std::vector<uint32_t> numbers = classes_of(sizes, options.n_experts, options.n_used);
        demand.classes[tier].resize(1 + *std::max_element(numbers.begin(), numbers.end()));
        for (uint32_t layer = 0; layer < options.n_layers; layer++) {
            slot_class & c = demand.classes[tier][numbers[layer]];
            c              = { std::max(c.size, sizes[layer]), c.n_experts + options.n_experts, c.n_layers + 1 };
        }
    }
    return demand;
}

static status check_options(const hobbit_simulation & options, const settings & given) {
    if (options.n_layers == 0 || options.n_experts == 0 || options.n_used == 0) {
        return status::error("a simulation needs at least one layer, one expert and one expert per token");
    }
    if (options.n_used > options.n_experts) {
        return status::error("%u experts per token are more than the %u of a layer", options.n_used, options.n_experts);
    }
    for (uint32_t layer = 0; options.n_used_by_layer && layer < options.n_layers; layer++) {
        if (const uint32_t n = options.n_used_by_layer[layer]; n == 0 || n > options.n_used) {
            return status::error("layer %u uses %u experts per token: make it 1 to %u", layer, n, options.n_used);
        }
    }
    if (!(options.bits_low > 0.0 && options.bits_low <= options.bits_high && std::isfinite(options.bits_low) &&
          std::isfinite(options.bits_high))) {
        return status::error("%g bits in low and %g in high precision: make 0 < low <= high", options.bits_low,
                             options.bits_high);
    }
    if (options.belady == 0 && registered_policy::traits(given.policy()).needs_prior && !options.prior) {
        return status::error("the policy %s needs the uses of an earlier run: give a prior, such as its trace",
                             given.policy().c_str());
    }
    if (options.belady != 0 && (!given.thresholds().all_high() || options.slots_low > 0)) {
        return status::error("belady is the bound for one pool of equal experts: simulate it with t1 = 1 and no low "
                             "pool");
    }
    if (options.belady != 0 && options.prior) {
        return status::error("belady knows all uses and begins with empty pools: simulate it without a prior");
    }
    return {};
}

namespace {

// Belady's algorithm: it knows all later uses. An expert's value falls with the time to its next use, and is least if
// that use is not counted, because loading it again then costs nothing. Keeping the most valuable experts gives the
// most counted hits: keeping an expert from one use to the next is an interval in time, at most as many intervals as
// slots may overlap, and the one that ends last is in conflict with most others.
class belady_policy : public cache_policy {
  public:
    explicit belady_policy(const hobbit_simulation & options) : futures_(options.n_layers, options.n_experts) {}

    // Announces the uses of one layer and batch, in the order of the run.
    void will_use(const hobbit_route * first, const hobbit_route * last) {
        time_++;
        std::map<int32_t, std::set<int32_t>> users; // [expert] sequences: on_use is called for each
        std::set<int32_t>                    counted;
        for (const hobbit_route * r = first; r < last; r++) {
            users[r->expert].insert(r->sequence);
            if (r->counted != 0) {
                counted.insert(r->expert);
            }
        }
        for (const auto & [expert, sequences] : users) {
            future & f = futures_[{ layer_id(first->layer), uint32_t(expert) }];
            f.values.insert(f.values.end(), sequences.size(), counted.count(expert) > 0 ? -double(time_) : nothing);
        }
    }

    void on_use(const expert_usage & use) override { futures_[use.id].n_past++; }

    double value(expert_id id, tier_id, layer_id) override {
        const future & f = futures_[id];
        return f.n_past < f.values.size() ? f.values[f.n_past] : nothing;
    }

  private:
    static constexpr double nothing = -std::numeric_limits<double>::infinity();

    struct future {
        std::vector<double> values; // value of each use, in order
        size_t              n_past = 0;
    };

    expert_table<future> futures_;
    uint64_t             time_ = 0;
};

// Compares the experts that a predictor names one layer ahead with those that the layer then chooses. Predicted experts
// are not loaded. Without a predictor it does nothing.
class prediction_judge {
  public:
    // Fails for a predictor that needs more than routes.
    status open(const hobbit_simulation & options, const settings & given) {
        if (!given.is_given("hobbit.predictor")) {
            return {};
        }
        predictor_options of;
        of.n_experts.assign(options.n_layers, options.n_experts);
        if (options.n_used_by_layer) {
            of.n_used.assign(options.n_used_by_layer, options.n_used_by_layer + options.n_layers);
        }
        of.bar = given.number("hobbit.prefetch_bar");
        of.paths.assign(options.paths, options.paths + options.n_paths);
        if (!each_path(of.paths, of.n_experts, [](const stored_path &) {})) {
            return status::error("the activation paths are not of these layers and experts");
        }
        const std::string & chosen = given.text("hobbit.predictor");
        std::string         all;
        for (const std::string & name : registered_predictor::names()) {
            of.name        = name;
            auto candidate = registered_predictor::make(of);
            if (candidate->accepts(nullptr)) { // it runs on routes
                all     += (all.empty() ? "" : ", ") + name;
                judged_  = name == chosen ? std::move(candidate) : std::move(judged_);
            }
        }
        return judged_
                   ? status()
                   : status::error("no predictor '%s' runs on routes alone, which is all that a trace holds: choose "
                                   "one of %s",
                                   chosen.c_str(), all.c_str());
    }

    // The layer's router has chosen; the counts go to `result` if the layer is counted.
    void on_routing(const layer_routing & routing, bool is_counted, hobbit_simulation_result & result) {
        if (!judged_) {
            return;
        }
        judged_->on_routing(routing);
        if (routing.layer != layer_) { // the layer did not run
            predicted_.clear();
            missing_.clear();
        }
        if (is_counted && routing.layer > 0) { // nothing is predicted for the first layer
            const std::set<uint32_t> chosen(routing.experts.begin(), routing.experts.end());
            const auto               is_chosen = [&](uint32_t e) { return chosen.count(e) > 0; };
            const auto               n_chosen  = [&](const std::set<uint32_t> & experts) {
                return uint64_t(std::count_if(experts.begin(), experts.end(), is_chosen));
            };
            result.predictable             += chosen.size();
            result.predicted_right         += n_chosen(predicted_);
            result.predicted_missing       += missing_.size();
            result.predicted_missing_right += n_chosen(missing_);
        }
    }

    // The layer's experts are loaded; the next layer is predicted.
    void look_ahead(const layer_routing & running, const std::function<bool(expert_id)> & is_resident) {
        if (!judged_) {
            return;
        }
        std::vector<layer_routing> predictions;
        const status               s = judged_->predict(running, 1, nullptr, nullptr, predictions);
        GGML_ASSERT(s.ok()); // it only reads its own tables
        layer_ = layer_id(running.layer + 1);
        predicted_.clear();
        missing_.clear();
        for (const layer_routing & next : predictions) {
            for (const int32_t expert : next.experts) {
                predicted_.insert(uint32_t(expert));
                if (!is_resident({ next.layer, uint32_t(expert) })) {
                    missing_.insert(uint32_t(expert));
                }
            }
        }
    }

  private:
    std::unique_ptr<predictor> judged_; // null: none
    layer_id                   layer_;  // layer that is predicted
    std::set<uint32_t>         predicted_;
    std::set<uint32_t>         missing_; // missing ones of these
};

class replay {
  public:
    replay(const hobbit_route * routes, const hobbit_simulation & options, const settings & given,
           const precision_costs & costs) :
        routes_(routes),
        options_(options),
        settings_(given),
        costs_(costs),
        is_bound_(options.belady != 0),
        numbers_(given.thresholds()) {}

    status run(const std::vector<route_batch> & batches, hobbit_simulation_result & result) {
        HOBBIT_TRY(judge_.open(options_, settings_));
        make_parts(batches);
        for (const route_batch & batch : batches) {
            for (const int32_t sequence : batch.begins) {
                policy_->begin_sequence(batch.numbers.at(sequence));
            }
            for (const auto & [sequence, n] : batch.n_tokens) {
                policy_->begin_tokens(batch.numbers.at(sequence), n);
            }
            result_.n_tokens += batch.n_counted;
            each_layer(batch, [&](size_t first, size_t last) { run_layer(first, last, batch); });
        }
        result_.penalty =
            double(result_.misses_high) + double(result_.misses_low) * (options_.bits_low / options_.bits_high);
        result = result_;
        return {};
    }

  private:
    void make_parts(const std::vector<route_batch> & batches) {
        if (options_.prior) {
            prior_ = { options_.n_layers, options_.n_experts };
            std::copy_n(options_.prior, prior_.size(), prior_.begin());
        }
        if (is_bound_) {
            auto bound = std::make_unique<belady_policy>(options_);
            for (const route_batch & batch : batches) {
                each_layer(batch, [&](size_t first, size_t last) { bound->will_use(routes_ + first, routes_ + last); });
            }
            policy_ = std::move(bound);
        } else {
            policy_options of;
            of.name      = settings_.policy();
            of.n_layers  = options_.n_layers;
            of.n_experts = options_.n_experts;
            of.n_used    = options_.n_used;
            of.weights   = settings_.weights();
            of.prior     = prior_;
            policy_      = registered_policy::make(of);
        }
        rule_ = registered_rule::make({ settings_.rule(), &costs_, options_.bits_low / options_.bits_high });
        step_.emplace(*rule_, *policy_);
        add_set(tier_id::high, options_.slots_high);
        add_set(tier_id::low, options_.slots_low);
        fill(tier_id::low);
        fill(tier_id::high);
    }

    // Fills free slots as expert_cache::fill does.
    void fill(tier_id tier) {
        std::vector<expert_id> brought;
        for (const expert_id id : most_used(prior_)) {
            if (set(tier).has_free_slot(id.layer) && insert({ id, tier }, resident_set::pressure::polite)) {
                brought.push_back(id);
            }
        }
        std::for_each(brought.rbegin(), brought.rend(), [&](expert_id id) { set(tier).touch(id); });
    }

    void add_set(tier_id tier, uint32_t n_slots) {
        const uint64_t n_all = uint64_t(options_.n_layers) * options_.n_experts;
        n_slots              = uint32_t(std::min<uint64_t>(n_slots, n_all));
        n_kept_              = tier == tier_id::high ? n_slots : n_kept_;
        // the bound evicts after the layer has run, and may then evict the layer's own experts
        const uint32_t       room    = is_bound_ ? uint32_t(n_all) : n_slots;
        const pool_demand    demand  = demand_of(options_);
        const slot_classes & classes = demand.classes[tier];
        const slot_numbers   numbers =
            slots_in(classes, std::min(room, options_.n_used), demand.all_bytes(tier) * room / n_all);
        sets_[tier].emplace(classes_of(sizes_of(options_, tier), options_.n_experts, options_.n_used),
                            options_.n_experts, tier, numbers, classes, options_.floors ? options_.n_used : 0,
                            *policy_);
    }

    resident_set & set(tier_id tier) { return *sets_[tier]; }

    // Returns true if the expert is resident then.
    bool insert(const expert_tier & e, resident_set::pressure how) {
        expert_id evicted;
        return set(e.tier).contains(e.id) || set(e.tier).insert(e.id, e.id.layer, how, &evicted);
    }

    // Calls visit(first, last) for the routes of each layer, in their order.
    template <typename Visit>
    void each_layer(const route_batch & batch, Visit visit) const {
        for (size_t first = batch.first, last = first; first < batch.last; first = last) {
            while (last < batch.last && routes_[last].layer == routes_[first].layer) {
                last++;
            }
            visit(first, last);
        }
    }

    void run_layer(size_t first, size_t last, const route_batch & batch) {
        layer_routing routing;
        routing.layer    = layer_id(routes_[first].layer);
        routing.n_used   = n_used_in(options_, routes_[first].layer);
        routing.n_tokens = int64_t(last - first) / routing.n_used;
        for (size_t i = first; i < last; i++) {
            routing.experts.push_back(routes_[i].expert);
            routing.weights.push_back(routes_[i].weight);
        }
        judge_.on_routing(routing,
                          std::any_of(routes_ + first, routes_ + last, [](auto & r) { return r.counted != 0; }),
                          result_);
        const residency is_resident = [&](expert_id id, tier_id tier) { return set(tier).contains(id); };

        const std::vector     thresholds(size_t(routing.n_tokens), numbers_);
        std::vector<uint32_t> sequences; // [token]
        for (size_t i = first; i < last; i += size_t(routing.n_used)) {
            sequences.push_back(batch.numbers.at(routes_[i].sequence));
        }
        const auto  is_counted = [&](int32_t i) { return routes_[first + size_t(i)].counted != 0; };
        step_counts counts;
        layer_plan  plan = step_->run({ routing, thresholds, is_resident, has_low_ }, sequences, counts, is_counted);
        add(counts);
        std::stable_partition(plan.uses.begin(), plan.uses.end(),
                              [&](const planned_use & use) { return is_resident(use.id, use.tier); });
        load(plan);
        judge_.look_ahead(routing, [&](expert_id id) {
            return set(tier_id::high).contains(id) || set(tier_id::low).contains(id);
        });
    }

    // If several selections miss the same expert, the first one counts as a miss and the others as hits.
    void add(const step_counts & counts) {
        result_.skipped     += counts.skipped;
        result_.hits_high   += counts.selections[tier_id::high] - counts.misses[tier_id::high];
        result_.hits_low    += counts.selections[tier_id::low] - counts.misses[tier_id::low];
        result_.misses_high += counts.misses[tier_id::high];
        result_.misses_low  += counts.misses[tier_id::low];
    }

    // REQUIRES: hits come first in the plan.
    void load(const layer_plan & plan) {
        std::vector<const planned_use *> held;
        for (const planned_use & use : plan.uses) {
            if (insert({ use.id, use.tier }, resident_set::pressure::urgent)) {
                set(use.tier).touch(use.id);
                set(use.tier).pin(use.id);
                held.push_back(&use);
            }
        }
        for (const planned_use * use : held) {
            set(use->tier).unpin(use->id);
        }
        while (is_bound_ && set(tier_id::high).n_residents() > n_kept_) {
            drop_least();
        }
    }

    void drop_least() {
        const auto & residents = set(tier_id::high).residents();
        const auto   is_less   = [&](const expert_id & a, const expert_id & b) {
            return policy_->value(a, tier_id::high, 0) < policy_->value(b, tier_id::high, 0);
        };
        set(tier_id::high).erase(*std::min_element(residents.begin(), residents.end(), is_less));
    }

    const hobbit_route *      routes_;
    const hobbit_simulation & options_;
    const settings &          settings_;
    const precision_costs &   costs_;
    const bool                is_bound_;
    const rule_numbers        numbers_;
    const bool                has_low_ = !numbers_.all_high(); // there are low versions

    expert_table<float> prior_; // empty: none

    std::unique_ptr<precision_rule> rule_;
    std::unique_ptr<cache_policy>   policy_;
    std::optional<layer_step>       step_;
    prediction_judge                judge_;
    uint32_t                        n_kept_ = 0; // slots of the high tier
    hobbit_simulation_result        result_ = {};

    per_tier<std::optional<resident_set>> sets_; // both
};

} // namespace

} // namespace hobbit

using namespace hobbit;

bool hobbit_simulate(const struct hobbit_route * routes, size_t n_routes, const struct hobbit_simulation * options,
                     struct hobbit_simulation_result * result, char * err, size_t err_size) {
    *result = {};
    return report_call("cannot simulate", err, err_size, [&]() -> status {
        settings                 given;
        std::vector<route_batch> batches;
        precision_costs          costs;
        HOBBIT_TRY(given.apply(options->settings, options->n_settings));
        HOBBIT_TRY(check_options(*options, given));
        HOBBIT_TRY(read_costs(*options, given, costs));
        HOBBIT_TRY(find_batches(routes, n_routes, *options, batches));
        return replay(routes, *options, given, costs).run(batches, *result);
    });
}

bool hobbit_simulated_pools(const struct hobbit_simulation * options, double capacity, uint32_t * high, uint32_t * low,
                            char * err, size_t err_size) {
    return report_call("cannot simulate", err, err_size, [&]() -> status {
        settings given;
        HOBBIT_TRY(given.apply(options->settings, options->n_settings));
        HOBBIT_TRY(check_options(*options, given));
        if (!(capacity >= 0.0 && capacity <= 1.0)) {
            return status::error("the capacity is %g: make it 0 to 1", capacity);
        }
        const pool_demand demand = demand_of(*options);
        const auto        all    = double(demand.all_bytes(tier_id::high));
        const pool_slots  slots =
            divide_pools(given.bounds(), demand, uint64_t(all * (capacity + 1e-12))); // 0.29 of 100 is 29
        *high = count_of(slots[tier_id::high]);
        *low  = count_of(slots[tier_id::low]);
        return {};
    });
}
