// SPDX-License-Identifier: MIT
#include "predict/prefetcher.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace hobbit {

// Standard errors between the mean and no difference. A gain of 10 % seldom looks like a loss then, in noise of a fifth
// that lasts from pair to pair, and a loss of 10 % is found after some 15 pairs.
static constexpr double CLEAR_GAIN = 2.5;
static constexpr double CLEAR_LOSS = 2.0;

prefetch_governor::verdict prefetch_governor::judge() const {
    const bool is_last = n_pairs_ == max_pairs;
    if (prefetched_ < min_experts) {
        return is_last ? verdict::gain : verdict::open;
    }
    if (n_pairs_ >= stall_pairs && stall_ < min_stall * wall_) {
        return verdict::loss;
    }
    if (ratios_.size() < min_pairs) {
        return is_last ? verdict::gain : verdict::open;
    }
    return compare_times();
}

prefetch_governor::verdict prefetch_governor::compare_times() const {
    const auto   n     = double(ratios_.size());
    const double mean  = std::accumulate(ratios_.begin(), ratios_.end(), 0.0) / n;
    const double sum   = std::accumulate(ratios_.begin(), ratios_.end(), 0.0,
                                         [&](double s, double r) { return s + (r - mean) * (r - mean); });
    const double error = std::sqrt(sum / (n - 1) / n);
    if (mean < -CLEAR_GAIN * error) {
        return verdict::gain;
    }
    if (mean > CLEAR_LOSS * error) {
        return verdict::loss;
    }
    if (n_pairs_ < max_pairs) {
        return verdict::open;
    }
    return mean < 0 ? verdict::gain : verdict::loss;
}

void prefetch_governor::end_trial(bool is_gain) {
    is_on_       = is_gain;
    left_        = is_gain ? hold : next_pause_;
    next_pause_  = is_gain ? min_pause : std::min(2 * next_pause_, max_pause);
    n_pauses_   += !is_gain;
    n_pairs_     = 0;
    prefetched_  = 0;
    wall_        = 0;
    stall_       = 0;
    ratios_.clear();
}

void prefetch_governor::end_pass(const pass & p) {
    if (!is_trial()) {
        left_--;
        return;
    }
    is_first_of_pair_ = !is_first_of_pair_;
    if (!is_first_of_pair_) {
        first_ = p;
        return;
    }
    n_pairs_++;
    prefetched_ += first_.prefetched;
    wall_       += p.wall;
    stall_      += p.stall;
    if (first_.wall > 0 && p.wall > 0) {
        ratios_.push_back(std::log(first_.wall / p.wall));
    }
    const verdict v = judge();
    if (v != verdict::open) {
        end_trial(v == verdict::gain);
    }
}

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

void prefetcher::end_layer(inner_graph &) {
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
void prefetcher::before_routing(next_layer & next) {
    const ggml_tensor * router_input = next.matmul->src[4];
    predictor *         ahead        = places_[next.layer].ahead;
    const uint32_t      n_ahead      = n_ahead_of(next.layer);
    const bool          is_first     = !in_pass_ || next.layer <= layer_;
    const bool          is_due       = !is_first && !is_second_ && !is_prompt_ && is_on() && n_ahead > 0;
    if (is_due && next.device.in_queue() && next.device.empty() && ahead->accepts(router_input)) {
        next.also = ahead->begin(next.layer, n_ahead, router_input, next.device.backend());
    }
    const bool may_read = !declined_ && n_ahead > 0 && (is_first || is_on());
    next.may_launch     = next.may_launch && (next.also || !may_read);
}

void prefetcher::after_routing(const next_layer & next, const char * bytes) {
    if (next.also) {
        places_[next.layer].ahead->end(bytes);
    }
}

status prefetcher::look_ahead(const running_layer & layer, ggml_backend_t backend) {
    const layer_routing & running      = layer.routing;
    const ggml_tensor *   router_input = layer.router_input;
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
    const layer_plan plan = plan_layer(*rule_, { prediction, thresholds, holds, has_low, index_.serving() });
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
