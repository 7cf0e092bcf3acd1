// SPDX-License-Identifier: MIT
#include "base/setting-table.h"
#include "policy/cache-policy.h"

namespace hobbit {

namespace {

// How often earlier runs used the expert, which never changes: the popularity by which Twiddler (section
// 3.4) places experts, and DAOP (DATE 2025, section IV-A) at the start. A demanded expert of less value than all others
// is the next victim, so that it only passes through: also where its layer holds little else.
class static_policy : public cache_policy {
  public:
    explicit static_policy(const policy_options & options) :
        uses_(options.prior.empty() ? options.table<float>() : options.prior) {}

    double value(expert_id id, tier_id, layer_id) override { return uses_[id]; }

    bool admits(expert_id newcomer, expert_id victim) override { return uses_[newcomer] > uses_[victim]; }

    bool has_quotas() const override { return false; }

  private:
    const expert_table<float> uses_;
};

const bool is_twiddler =
    register_paper({ "twiddler", "a GPU and a calibration", "t1=1 mode=twiddler policy=static prefetch=0" });

const auto registered = registered_policy::of<static_policy>("static", { /* .needs_prior = */ true });

} // namespace

} // namespace hobbit
