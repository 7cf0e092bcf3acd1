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

// A function, so that it exists before the first counter.
std::vector<const registered_counter *> & registry() {
    static std::vector<const registered_counter *> all;
    return all;
}

} // namespace

registered_counter::registered_counter(const char * name, const char * metric, const char * help) :
    row_{ name, HOBBIT_COUNT, metric, nullptr, help } {
    const auto by_name = [](const registered_counter * a, const registered_counter * b) {
        return std::string(a->row().name) < b->row().name;
    };
    registry().insert(std::upper_bound(registry().begin(), registry().end(), this, by_name), this);
}

const std::vector<const registered_counter *> & registered_counter::all() {
    return registry();
}

std::map<const registered_counter *, stats::counter> stats::zeros() {
    std::map<const registered_counter *, counter> all;
    for (const registered_counter * each : registry()) {
        all.try_emplace(each, 0);
    }
    return all;
}

double stats::value(size_t i) const {
    return i < std::size(rows) ? rows[i].value(*this) : double(own.at(registry()[i - std::size(rows)]));
}

} // namespace hobbit

const struct hobbit_counter * hobbit_counter_at(size_t i) {
    using namespace hobbit;
    if (i < std::size(rows)) {
        return &rows[i].counter;
    }
    const auto & more = registered_counter::all();
    return i - std::size(rows) < more.size() ? &more[i - std::size(rows)]->row() : nullptr;
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
