// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

#include "base/name-table.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

namespace hobbit {

// Each in a file of its own.
std::unique_ptr<precision_rule> make_edgemoe_rule(const rule_options & options);
std::unique_ptr<precision_rule> make_gate_rule(const rule_options & options);
std::unique_ptr<precision_rule> make_price_rule(const rule_options & options);
std::unique_ptr<precision_rule> make_rank_rule(const rule_options & options);
std::unique_ptr<precision_rule> make_random_rule(const rule_options & options);

namespace {

struct named_rule {
    const char * name;
    std::unique_ptr<precision_rule> (*make)(const rule_options & options);
    bool takes_price;
};

const named_rule rules[] = {
    { "gate", make_gate_rule, false }, { "price", make_price_rule, true },    { "edgemoe", make_edgemoe_rule, true },
    { "rank", make_rank_rule, false }, { "random", make_random_rule, false },
};

} // namespace

std::unique_ptr<precision_rule> make_rule(const rule_options & options) {
    return make_named(rules, options.name, options);
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

precision of_score(double score, const score_thresholds & thresholds) {
    if (score <= thresholds.t1) {
        return precision::high;
    }
    // the sum may be rounded to a score above 1
    return thresholds.t2 >= 1.0 || score <= thresholds.t2 ? precision::low : precision::skip;
}

bool takes_price(const std::string & name) {
    return std::any_of(std::begin(rules), std::end(rules),
                       [&](const named_rule & rule) { return name == rule.name && rule.takes_price; });
}

const std::vector<std::string> & rule_names() {
    static const std::vector<std::string> names = names_of(rules);
    return names;
}

} // namespace hobbit
