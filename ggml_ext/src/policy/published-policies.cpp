// SPDX-License-Identifier: MIT
#include "policy/policies.h"
#include "policy/usage-records.h"

#include <algorithm>

namespace hobbit {

namespace {

class sequence_policy : public cache_policy {
  public:
    explicit sequence_policy(const policy_options & options) :
        n_layers_(options.n_layers), records_(options.n_layers, options.n_experts) {}

    void begin_sequence(uint32_t sequence) override { records_.begin_sequence(sequence); }
    void begin_tokens(uint32_t sequence, uint32_t n) override { records_.begin_tokens(sequence, n); }
    void on_use(const expert_usage & use) override { records_.on_use(use); }

  protected:
    const uint32_t n_layers_;
    usage_records  records_;
};

class hobbit_policy : public sequence_policy {
  public:
    explicit hobbit_policy(const policy_options & options) : sequence_policy(options), w_(options.weights) {}

    double value(expert_id id, term_id, layer_id layer) override {
        const double used = records_.largest(id, [&](const usage_record & r, uint32_t n_tokens, uint64_t) {
            return (w_[0] * r.last_token + w_[1] * r.n_uses + w_[2] * r.n_high_uses) / std::max(n_tokens, 1u);
        });
        return used + w_[3] * layer_nearness(id.layer, layer, n_layers_);
    }

  private:
    const std::array<double, 4> w_; // of LRU, LFU, LHU, FLD
};

class moe_infinity_policy : public sequence_policy {
  public:
    using sequence_policy::sequence_policy;

    double value(expert_id id, term_id, layer_id) override {
        constexpr double epsilon = 1e-4;
        const double     share   = records_.largest(id, [](const usage_record & r, uint32_t, uint64_t layer_uses) {
            return double(r.n_uses) / double(std::max<uint64_t>(layer_uses, 1));
        });
        return (share + epsilon) * (1.0 - double(id.layer) / n_layers_);
    }
};

class edgemoe_policy : public cache_policy {
  public:
    explicit edgemoe_policy(const policy_options & options) : n_layers_(options.n_layers), uses_(make_lfu(options)) {}

    void begin_sequence(uint32_t) override {}
    void begin_tokens(uint32_t, uint32_t) override {}
    void on_use(const expert_usage & use) override { uses_->on_use(use); }

    double value(expert_id id, term_id term, layer_id layer) override {
        const uint32_t ahead = 1 + (id.layer + 2 * n_layers_ - layer - 1) % n_layers_;
        return uses_->value(id, term, layer) / ahead;
    }

  private:
    const uint32_t                n_layers_;
    std::unique_ptr<cache_policy> uses_;
};

} // namespace

std::unique_ptr<cache_policy> make_hobbit(const policy_options & options) {
    return std::make_unique<hobbit_policy>(options);
}

std::unique_ptr<cache_policy> make_moe_infinity(const policy_options & options) {
    return std::make_unique<moe_infinity_policy>(options);
}

std::unique_ptr<cache_policy> make_edgemoe(const policy_options & options) {
    return std::make_unique<edgemoe_policy>(options);
}

} // namespace hobbit
