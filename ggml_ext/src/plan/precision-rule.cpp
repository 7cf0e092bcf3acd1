// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

namespace hobbit {

// A function, so that it exists before the first number.
static std::vector<const rule_number *> & registry() {
    static std::vector<const rule_number *> all;
    return all;
}

rule_number::rule_number(const char * owner, const char * key, double max, const char * by_default, finer finer_values,
                         const char * help, const char * most, const char * unit, const char * note) :
    rule(owner),
    spec{ key,
          key + std::strlen("hobbit."),
          HOBBIT_TYPE_NUMBER,
          0,
          max,
          by_default,
          note,
          nullptr,
          unit,
          finer_values != finer::neither,
          true,
          nullptr,
          help },
    values(finer_values),
    limit(most),
    exact(std::strtod(by_default, nullptr)),
    place(registry().size()) {
    GGML_ASSERT(place < HOBBIT_MAX_RULE_NUMBERS);
    const auto order = [](const rule_number * n) {
        return std::pair(!n->asks_for_precision(), std::string(n->spec.key));
    };
    const auto in_order = [&](const rule_number * a, const rule_number * b) { return order(a) < order(b); };
    registry().insert(std::upper_bound(registry().begin(), registry().end(), this, in_order), this);
}

const std::vector<const rule_number *> & rule_number::all() {
    return registry();
}

const rule_number * rule_number::find(const std::string & key) {
    const auto found = std::find_if(all().begin(), all().end(), [&](auto * each) { return key == each->spec.key; });
    return found == all().end() ? nullptr : *found;
}

rule_numbers::rule_numbers() {
    for (const rule_number * each : rule_number::all()) {
        (*this)[*each] = each->exact;
    }
}

// Returns true if the number asks for at least as much precision by `a` as by `b`.
static bool is_finer(const rule_number & number, double a, double b) {
    return !number.asks_for_precision() || (number.values == rule_number::finer::larger ? a >= b : a <= b);
}

bool rule_numbers::covers(const rule_numbers & other) const {
    const auto & all = rule_number::all();
    return std::all_of(all.begin(), all.end(),
                       [&](auto * each) { return is_finer(*each, (*this)[*each], other[*each]); });
}

rule_numbers rule_numbers::pick(const rule_numbers & a, const rule_numbers & b, bool finer) {
    rule_numbers picked;
    for (const rule_number * each : rule_number::all()) {
        if (each->asks_for_precision()) {
            picked[*each] = is_finer(*each, a[*each], b[*each]) == finer ? a[*each] : b[*each];
        }
    }
    return picked;
}

bool ranks_experts(const float * weights, size_t n) {
    const double sum = std::accumulate(weights, weights + n, 0.0);
    return sum > 0.0 && std::isfinite(sum);
}

std::vector<size_t> by_weight(const float * weights, size_t n) {
    std::vector<size_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weights[a] > weights[b]; });
    return order;
}

std::vector<precision> precision_rule::decide(const rule_input & in) {
    const auto             n_used = size_t(in.routing.n_used);
    std::vector<precision> out(in.routing.experts.size(), precision::high);
    for (size_t first = 0; first < in.routing.weights.size(); first += n_used) {
        if (!in.thresholds[first / n_used].all_high() && ranks_experts(&in.routing.weights[first], n_used)) {
            decide_token(in, first, &out[first]);
        }
    }
    return out;
}

std::vector<const rule_number *> numbers_of(const std::string & rule) {
    std::vector<const rule_number *> found;
    std::istringstream               keys(registered_rule::traits(rule).numbers);
    for (std::string key; keys >> key;) {
        found.push_back(rule_number::find(key));
    }
    return found;
}

bool asks_for_low(const std::string & rule, const rule_numbers & numbers) {
    const auto asks = registered_rule::traits(rule).asks_for_low;
    return asks ? asks(numbers) : !numbers.all_high();
}

double low_demand(const std::string & rule, const rule_numbers & numbers) {
    const auto demand = registered_rule::traits(rule).low_demand;
    return demand ? demand(numbers) : asks_for_low(rule, numbers) ? 1.0 : 0.0;
}

std::string text_of(const std::string & rule, const rule_numbers & numbers, const char * prefix,
                    const char * separator) {
    std::string text;
    for (const rule_number * each : numbers.all_high() ? std::vector<const rule_number *>() : numbers_of(rule)) {
        text += (text.empty() ? "" : separator) +
                format(*prefix ? "%s%s=%.3g" : "%s%s %.3g", prefix, each->spec.option, numbers[*each]);
    }
    return text;
}

status precision_costs::set(std::vector<float> low, std::vector<float> skip, uint32_t n_layers, uint32_t n_experts) {
    const size_t n_all = size_t(n_layers) * n_experts;
    if (low.size() != skip.size() || (low.size() != n_layers && low.size() != n_all)) {
        return status::error("there are %zu costs of low precision and %zu of skipping: give one of each for "
                             "every layer (%u) or for every expert (%zu)",
                             low.size(), skip.size(), n_layers, n_all);
    }
    const auto is_wrong = [](float cost) { return !(cost >= 0.0f); }; // also NaN
    if (std::any_of(low.begin(), low.end(), is_wrong) || std::any_of(skip.begin(), skip.end(), is_wrong)) {
        return status::error("a cost of low precision or of skipping is negative or NaN: costs are 0 or more");
    }
    n_per_layer_ = low.size() / n_layers;
    low_         = std::move(low);
    skip_        = std::move(skip);
    return {};
}

} // namespace hobbit

const struct hobbit_setting_spec * hobbit_rule_number_at(size_t i) {
    const auto & all = hobbit::rule_number::all();
    return i < all.size() && all[i]->asks_for_precision() ? &all[i]->spec : nullptr;
}

const char * hobbit_numbers_of_rule(const char * rule) {
    return hobbit::registered_rule::traits(rule).numbers;
}
