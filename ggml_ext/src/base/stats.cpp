// SPDX-License-Identifier: MIT
#include "base/stats.h"

#include <algorithm>
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
