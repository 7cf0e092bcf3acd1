// SPDX-License-Identifier: MIT
#include "base/stats.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>

namespace hobbit {

namespace {

struct row {
    hobbit_counter counter;
    double (*value)(const stats & s);
};

#define VALUE(expression) [](const stats & s) { return double(expression); }
#define TIER(field, tier, name, help)                                                                                  \
    { { #field "_" name, HOBBIT_COUNT, #field "_total", "precision=\"" name "\"", help },                              \
      VALUE(s.field[tier_id(tier)]) },
#define TIERS(field, help) TIER(field, 0, "high", help) TIER(field, 1, "low", help)
#define COUNT(field, metric, label, help) { { #field, HOBBIT_COUNT, metric, label, help }, VALUE(s.field) },
#define SECONDS(field, metric, help)                                                                                   \
    { { #field "_s", HOBBIT_SECONDS, metric, nullptr, help }, VALUE(double(s.field##_ns) * 1e-9) },
#define STATE(field, metric, help) { { #field, HOBBIT_STATE, metric, nullptr, help }, VALUE(s.field) },

const row rows[] = { HOBBIT_COUNTERS(TIERS, COUNT, SECONDS, STATE) };

// [name]. A function, so that it exists before the first counter.
std::map<std::string, hobbit_counter> & registry() {
    static std::map<std::string, hobbit_counter> all;
    return all;
}

// The i-th value, by name.
template <typename Value>
const Value & at(const std::map<std::string, Value> & counters, size_t i) {
    return std::next(counters.begin(), ptrdiff_t(i))->second;
}

} // namespace

bool register_counter(const char * name, const char * metric, const char * help) {
    registry()[name] = { name, HOBBIT_COUNT, metric, nullptr, help };
    return true;
}

std::map<std::string, stats::counter> stats::zeros() {
    std::map<std::string, counter> all;
    for (const auto & each : registry()) {
        all.try_emplace(each.first, 0);
    }
    return all;
}

double stats::value(size_t i) const {
    return i < std::size(rows) ? rows[i].value(*this) : double(at(own, i - std::size(rows)));
}

} // namespace hobbit

const struct hobbit_counter * hobbit_counter_at(size_t i) {
    using namespace hobbit;
    if (i < std::size(rows)) {
        return &rows[i].counter;
    }
    return i - std::size(rows) < registry().size() ? &at(registry(), i - std::size(rows)) : nullptr;
}

struct hobbit_rates hobbit_get_rates(const double * before, const double * after, double seconds,
                                     uint32_t n_token_uses) {
    const auto change = [&](const std::string & name) {
        size_t i = 0;
        while (hobbit_counter_at(i)->name != name) {
            i++;
        }
        return std::max(0.0, after[i] - before[i]);
    };
    const auto   over   = [](double some, double all) { return all > 0.0 ? some / all : std::nan(""); };
    const double high   = change("hits_high");
    const double low    = change("hits_low");
    const double misses = change("misses_high") + change("misses_low");
    const double uses   = change("selections_high") + change("selections_low") + change("selections_skipped");
    const double tokens = over(uses, n_token_uses);
    const double stall  = std::min(over(change("stall_s"), seconds), 1.0);
    return {
        over(tokens, seconds),
        over(high + low, high + low + misses),
        over(high, high + change("misses_high")),
        over(low, low + change("misses_low")),
        over(change("host_hits_high") + change("host_hits_low"), misses),
        over(change("bytes_read"), seconds),
        over(change("bytes_read"), tokens),
        stall,
        std::clamp(over(change("compute_s"), seconds) - stall, 0.0, 1.0 - stall),
        over(change("selections_high"), uses),
        over(change("selections_low"), uses),
        over(change("selections_skipped"), uses),
        over(change("selections_cpu"), uses),
    };
}
