// SPDX-License-Identifier: MIT
// The policies that are one formula: the baselines and those of the papers. n is the number of layers, i the layer that
// runs, l the expert's layer.
#include "policy/cache-policy.h"

#include <algorithm>
#include <random>

namespace hobbit {

namespace {

//
// Baselines; their counts run over all sequences and are never reset
//

class counting_policy : public cache_policy {
  public:
    explicit counting_policy(const policy_options & options) :
        n_layers_(options.n_layers), counts_(options.table<uint64_t>()) {}

    double value(expert_id id, tier_id, layer_id) override { return double(counts_[id]); }

  protected:
    const uint32_t         n_layers_;
    expert_table<uint64_t> counts_;
};

// Least recently used.
class lru_policy : public counting_policy {
  public:
    using counting_policy::counting_policy;

    void on_use(const expert_usage & use) override { counts_[use.id] = ++n_uses_; }

  private:
    uint64_t n_uses_ = 0;
};

constexpr double prior_tokens = 64.0; // the uses of earlier runs count as those of so many tokens

// Least frequently used: the number of tokens that used the expert, from those of earlier runs on.
class lfu_policy : public counting_policy {
  public:
    explicit lfu_policy(const policy_options & options) : counting_policy(options) {
        for (size_t i = 0; i < options.prior.size(); i++) {
            const expert_id id = options.prior.id(i);
            counts_[id]        = uint64_t(prior_tokens * options.prior[id] + 0.5);
        }
    }

    void on_use(const expert_usage & use) override { counts_[use.id] += use.n_tokens; }
};

// Least frequently used in high precision (section 3.4 of HOBBIT, arXiv 2411.01433).
class lhu_policy : public counting_policy {
  public:
    using counting_policy::counting_policy;

    void on_use(const expert_usage & use) override { counts_[use.id] += use.tier == tier_id::high ? use.n_tokens : 0; }
};

// 1 for the running layer; every layer that runs before the next turn of `layer` takes off 1/n.
double layer_nearness(layer_id layer, layer_id running, uint32_t n_layers) {
    return 1.0 - double((layer + n_layers - running) % n_layers) / n_layers;
}

// Farthest layer distance (section 3.4 of HOBBIT): 1 - ((l - i + n) mod n) / n.
class fld_policy : public cache_policy {
  public:
    explicit fld_policy(const policy_options & options) : n_layers_(options.n_layers) {}

    double value(expert_id id, tier_id, layer_id layer) override { return layer_nearness(id.layer, layer, n_layers_); }

  private:
    const uint32_t n_layers_;
};

// A new random number each time; the seed determines the sequence.
class random_policy : public cache_policy {
  public:
    explicit random_policy(const policy_options & options) : random_(options.seed) {}

    double value(expert_id, tier_id, layer_id) override { return double(random_()); }

  private:
    std::mt19937_64 random_;
};

//
// Policies of papers
//

// Eq. 3 of HOBBIT (arXiv 2411.01433):
//   w_lru R/T + w_lfu F/T + w_lhu H/T + w_fld (1 - ((l - i + n) mod n) / n)
// R: number of the last token that used the expert; F: tokens that used it; H: tokens that it served in high precision;
// T: tokens so far; all of one sequence, shared by the pools of both tiers. The largest value of all sequences counts.
class hobbit_policy : public cache_policy {
  public:
    explicit hobbit_policy(const policy_options & options) :
        n_layers_(options.n_layers), records_(options.n_layers, options.n_experts), w_(options.weights) {}

    void begin_sequence(uint32_t sequence) override { records_.begin_sequence(sequence); }
    void begin_tokens(uint32_t sequence, uint32_t n) override { records_.begin_tokens(sequence, n); }
    void on_use(const expert_usage & use) override { records_.on_use(use); }

    double value(expert_id id, tier_id, layer_id layer) override {
        const double used = records_.largest(id, [&](const usage_record & r, uint32_t n_tokens) {
            const double own = (w_[0] * r.last_token + w_[1] * r.n_uses + w_[2] * r.n_high_uses);
            return own / std::max(n_tokens, 1u);
        });
        return used + w_[3] * layer_nearness(id.layer, layer, n_layers_);
    }

  private:
    const uint32_t              n_layers_;
    usage_records               records_;
    const std::array<double, 4> w_; // weights of LRU, LFU, LHU, FLD
};

// EdgeMoE (arXiv 2308.14352), section III-C2: f / d, where f is how often the expert was used and d how many layers
// ahead it lies, from 1 (the next layer) to n (the running layer, which runs again in the next token). The paper prints
// (n - l + i) mod n in place of d. That is 0 for the running layer and grows the nearer a layer is, against the paper's
// text; we follow the text. f begins with the uses of earlier runs, the paper's profile, and
// counts over all sequences.
class edgemoe_policy : public lfu_policy {
  public:
    using lfu_policy::lfu_policy;

    double value(expert_id id, tier_id tier, layer_id layer) override {
        const uint32_t ahead = 1 + (id.layer + 2 * n_layers_ - layer - 1) % n_layers_;
        return lfu_policy::value(id, tier, layer) / ahead;
    }
};

const registered_policy all[] = {
    registered_policy::of<lru_policy>("lru"),         registered_policy::of<lfu_policy>("lfu"),
    registered_policy::of<lhu_policy>("lhu"),         registered_policy::of<fld_policy>("fld"),
    registered_policy::of<random_policy>("random"),   registered_policy::of<hobbit_policy>("hobbit"),
    registered_policy::of<edgemoe_policy>("edgemoe"),
};

} // namespace

} // namespace hobbit
