// SPDX-License-Identifier: MIT
#include "predict/prefetcher.h"

#include "ggml-impl.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

namespace hobbit {

prefetcher::prefetcher(const expert_index & index, const std::vector<layer_place> & places, uint32_t n_ahead,
                       std::unique_ptr<precision_rule> rule, const sequence_thresholds & thresholds,
                       const batch_info & batch, stats & stats, clock now) :
    index_(index),
    n_ahead_(n_ahead),
    stats_(stats),
    rule_(std::move(rule)),
    thresholds_(thresholds),
    batch_(batch),
    places_(places),
    expected_(index.n_layers()),
    draft_(index.n_layers()),
    n_layers_run_(0),
    now_(std::move(now)) {
    stats_.prefetch_active = n_ahead > 0;

    bool any = n_ahead == 0;
    for (layer_id layer = 0; layer < index.n_layers() && n_ahead > 0; layer++) {
        predictors_.insert(places[layer].ahead);
        any = any || (layer > 0 && places.front().ahead->knows(layer));
    }
    if (!any) {
        decline("the routers of this model are not known");
    }
}

void prefetcher::decline(const std::string & why) {
    GGML_LOG_WARN("hobbit: no prefetch, %s\n", why.c_str());
    declined_              = true;
    stats_.prefetch_active = false;
}

void prefetcher::on_routing(const layer_routing & routing) {
    if (!in_pass_ || routing.layer <= layer_) {
        end_pass();
        begin_pass(routing);
    }
    const std::set<uint32_t> chosen(routing.experts.begin(), routing.experts.end());
    layer_ = routing.layer;
    judge(routing.layer, chosen);
    if (is_second_) {
        return; // the predictors have heard of this batch
    }
    for (predictor * p : predictors_) {
        p->on_routing(routing);
    }
    if (batch_.pass() == batch_pass::draft) {
        draft_.on_routing(routing);
    }
}

void prefetcher::begin_pass(const layer_routing & routing) {
    in_pass_   = true;
    is_prompt_ = routing.n_tokens > batch_info::max_generated;
    is_second_ = batch_.pass() == batch_pass::second;
    asked_     = 0;
    pass_      = {};
    begun_     = now_();

    stall_before_  = stats_.stall_ns;
    missed_before_ = n_missed();
}

void prefetcher::end_pass() {
    if (!in_pass_) {
        return;
    }
    for (layer_id layer = 0; layer < expected_.size(); layer++) {
        judge(layer, {}); // did not run
    }
    n_layers_run_ = std::max(n_layers_run_, layer_ + 1);
    n_quiet_      = pass_.prefetched > 0 || n_missed() > missed_before_ ? 0 : n_quiet_ + 1;
    if (!is_prompt_ && !is_second_) {
        governor_.end_pass(pass_);
    }
    stats_.prefetch_pauses = governor_.n_pauses();
    stats_.prefetch_active = !declined_ && n_ahead_ > 0 && (!has_trials_ || governor_.is_on());
    in_pass_               = false;
}

void prefetcher::end_layer(layer_id) {
    pass_.wall  = double(std::chrono::nanoseconds(now_() - begun_).count());
    pass_.stall = double(stats_.stall_ns - stall_before_);
}

// Compares a layer's expectation with its router's choice.
void prefetcher::judge(layer_id layer, const std::set<uint32_t> & chosen) {
    expectation & e = expected_[layer];
    if (e.predicted.empty()) {
        return;
    }
    const auto n_chosen = [&](const std::set<uint32_t> & experts) {
        return uint64_t(std::count_if(experts.begin(), experts.end(), [&](uint32_t i) { return chosen.count(i) > 0; }));
    };
    stats_.predicted       += e.predicted.size();
    stats_.predicted_right += n_chosen(e.predicted);
    stats_.prefetched      += e.prefetched.size();
    stats_.prefetched_used += n_chosen(e.prefetched);
    pass_.prefetched       += e.prefetched.size();
    e                       = {};
    places_[layer].cache->end_prefetch(layer);
}

// Requests that it had to postpone come first: earlier layers need them sooner.
status prefetcher::replay(const layer_routing & running, ggml_backend_t backend) {
    HOBBIT_TRY(draft_.predict(running, uint32_t(expected_.size()), nullptr, backend, predictions_));
    for (const layer_routing & prediction : predictions_) {
        if (prediction.layer < asked_) {
            continue;
        }
        if (prefetch(prediction) == outcome::no_room) {
            break;
        }
        asked_ = prediction.layer + 1;
    }
    return {};
}

// Layers to predict behind the running one.
uint32_t prefetcher::n_ahead_of(layer_id running) const {
    const uint32_t end = n_layers_run_ > 0 ? n_layers_run_ : uint32_t(expected_.size());
    return running + 1 < end ? std::min(n_ahead_, end - 1 - running) : 0;
}

// The first layer of a pass does not know yet what kind of pass it is.
const ggml_tensor * prefetcher::begin(layer_id running, const ggml_tensor * router_input, ggml_backend_t backend) {
    predictor *    ahead   = places_[running].ahead;
    const uint32_t n_ahead = n_ahead_of(running);
    const bool     is_due  = in_pass_ && running > layer_ && !is_second_ && !is_prompt_ && is_on();
    return is_due && n_ahead > 0 && ahead->accepts(router_input) ? ahead->begin(running, n_ahead, router_input, backend)
                                                                 : nullptr;
}

status prefetcher::look_ahead(const layer_routing & running, const ggml_tensor * router_input, ggml_backend_t backend) {
    if (is_second_) {
        return replay(running, backend);
    }
    const uint32_t n_ahead = n_ahead_of(running.layer);
    if (!is_on() || n_ahead == 0) {
        return {};
    }
    predictor & ahead = *places_[running.layer].ahead;
    if (!ahead.accepts(router_input)) {
        decline("what this model's routers are applied to is not known, or not of their width");
        return {};
    }
    HOBBIT_TRY(ahead.predict(running, n_ahead, router_input, backend, predictions_));

    for (const layer_routing & prediction : predictions_) {
        if (prefetch(prediction) != outcome::all_resident) {
            break;
        }
    }
    return {};
}

// Protects the experts predicted for a layer, then prefetches the missing ones while there is room, by falling weight.
prefetcher::outcome prefetcher::prefetch(const layer_routing & prediction) {
    const part_set  parts = index_.layer(prediction.layer).parts;
    expert_cache &  cache = *places_[prediction.layer].cache;
    const residency holds = [&](expert_id id, tier_id tier) { return cache.holds(id, tier, parts); };
    // a prefetched expert serves the most demanding sequence
    const std::vector<rule_numbers> thresholds(size_t(prediction.n_tokens), thresholds_.highest(batch_));
    const bool                      has_low = cache.n_slots(tier_id::low) > 0;
    const layer_plan plan = plan_layer(*rule_, { prediction, thresholds, holds, has_low, index_.high_presence() });
    expectation &    e    = expected_[prediction.layer];
    e.predicted.insert(prediction.experts.begin(), prediction.experts.end());

    std::multimap<double, const planned_use *, std::greater<double>> missing; // [weight]
    for (const planned_use & use : plan.uses) {
        if (holds(use.id, use.tier)) {
            cache.protect(use.id, use.tier);
            continue;
        }
        const double weight = std::accumulate(use.selections.begin(), use.selections.end(), 0.0,
                                              [&](double w, int32_t i) { return w + prediction.weights[size_t(i)]; });
        missing.emplace(weight, &use);
    }
    for (const auto & [weight, use] : missing) {
        if (cache.prefetch(use->id, use->tier, parts)) {
            e.prefetched.insert(use->id.expert);
        }
    }
    const bool have_all = std::all_of(missing.begin(), missing.end(),
                                      [&](const auto & each) { return holds(each.second->id, each.second->tier); });
    return missing.empty() ? outcome::all_resident : have_all ? outcome::all_requested : outcome::no_room;
}

} // namespace hobbit
