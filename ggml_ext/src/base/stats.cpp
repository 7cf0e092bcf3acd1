// SPDX-License-Identifier: MIT
#include "base/stats.h"

#include "hobbit.h"

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

} // namespace

double stats::value(size_t i) const {
    return rows[i].value(*this);
}

} // namespace hobbit

const struct hobbit_counter * hobbit_counter_at(size_t i) {
    using namespace hobbit;
    return i < sizeof(rows) / sizeof(rows[0]) ? &rows[i].counter : nullptr;
}
