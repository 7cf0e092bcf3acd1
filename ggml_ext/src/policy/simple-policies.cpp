// SPDX-License-Identifier: MIT
#include "model/expert-index.h"
#include "policy/policies.h"

#include <random>

namespace hobbit {

namespace {

// One number per expert, in the end its value.
class counting_policy : public cache_policy {
  public:
    explicit counting_policy(const policy_options & options) :
        n_experts_(options.n_experts), counts_(size_t(options.n_layers) * options.n_experts, 0) {}

    void begin_sequence(uint32_t) override {}
    void begin_tokens(uint32_t, uint32_t) override {}

    double value(expert_id id, term_id, layer_id) override { return double(counts_[index(id)]); }

  protected:
    uint64_t & count(expert_id id) { return counts_[index(id)]; }

  private:
    size_t index(expert_id id) const { return size_t(id.layer) * n_experts_ + id.expert; }

    const uint32_t        n_experts_;
    std::vector<uint64_t> counts_; // [layer * n_experts + expert]
};

class lru_policy : public counting_policy {
  public:
    using counting_policy::counting_policy;

    void on_use(const expert_usage & use) override { count(use.id) = ++n_uses_; }

  private:
    uint64_t n_uses_ = 0;
};

class lfu_policy : public counting_policy {
  public:
    using counting_policy::counting_policy;

    void on_use(const expert_usage & use) override { count(use.id) += use.n_tokens; }
};

class lhu_policy : public counting_policy {
  public:
    using counting_policy::counting_policy;

    void on_use(const expert_usage & use) override { count(use.id) += use.tier == tier_id::high ? use.n_tokens : 0; }
};

class stateless_policy : public cache_policy {
  public:
    void begin_sequence(uint32_t) override {}
    void begin_tokens(uint32_t, uint32_t) override {}
    void on_use(const expert_usage &) override {}
};

class fld_policy : public stateless_policy {
  public:
    explicit fld_policy(const policy_options & options) : n_layers_(options.n_layers) {}

    double value(expert_id id, term_id, layer_id layer) override { return layer_nearness(id.layer, layer, n_layers_); }

  private:
    const uint32_t n_layers_;
};

class random_policy : public stateless_policy {
  public:
    explicit random_policy(const policy_options & options) : random_(options.seed) {}

    double value(expert_id, term_id, layer_id) override { return double(random_()); }

  private:
    std::mt19937_64 random_;
};

} // namespace

double layer_nearness(layer_id layer, layer_id running, uint32_t n_layers) {
    return 1.0 - double((layer + n_layers - running) % n_layers) / n_layers;
}

std::unique_ptr<cache_policy> make_lru(const policy_options & options) {
    return std::make_unique<lru_policy>(options);
}

std::unique_ptr<cache_policy> make_lfu(const policy_options & options) {
    return std::make_unique<lfu_policy>(options);
}

std::unique_ptr<cache_policy> make_lhu(const policy_options & options) {
    return std::make_unique<lhu_policy>(options);
}

std::unique_ptr<cache_policy> make_fld(const policy_options & options) {
    return std::make_unique<fld_policy>(options);
}

std::unique_ptr<cache_policy> make_random(const policy_options & options) {
    return std::make_unique<random_policy>(options);
}

} // namespace hobbit
