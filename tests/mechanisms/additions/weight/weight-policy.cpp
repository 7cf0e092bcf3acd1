// SPDX-License-Identifier: MIT
// Evicts the expert with the smallest sum of gate weights.
#include "policy/cache-policy.h"

namespace hobbit {

namespace {

class weight_policy : public cache_policy {
  public:
    explicit weight_policy(const policy_options & options) : sums_(options.table<double>()) {}

    void on_use(const expert_usage & use) override { sums_[use.id] += use.weight; }

    double value(expert_id id, tier_id, layer_id) override { return sums_[id]; }

  private:
    expert_table<double> sums_;
};

const registered_policy weight = registered_policy::of<weight_policy>("weight");

} // namespace

} // namespace hobbit
