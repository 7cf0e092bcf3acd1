// SPDX-License-Identifier: MIT
#include "policy/cache-policy.h"

#include <algorithm>
#include <cmath>

namespace hobbit {

namespace {

constexpr double HALF_LIFE = 128; // tokens
constexpr int    N_CLASSES = 8;

// ClassLRU of llama.cpp's own expert cache (--moe-cache-mib): the victim has the largest age / 2^class. The age is how
// many uses of any expert ago it was used. The class is one of 8, by a count of the tokens that used the expert, which
// halves every 128 tokens and is kept across evictions.
//
// Our reading: the class is the logarithm of the count to base 2, rounded down. An expert that every token uses has a
// count of 185 and thus the highest class.
class class_lru_policy : public cache_policy {
  public:
    explicit class_lru_policy(const policy_options & options) : experts_(options.table<expert>()) {}

    void begin_tokens(uint32_t, uint32_t n) override { n_tokens_ += n; }

    void on_use(const expert_usage & use) override {
        expert & e = experts_[use.id];
        e          = { count(e) + use.n_tokens, n_tokens_, ++n_uses_ };
    }

    double value(expert_id id, term_id, layer_id) override {
        const expert & e        = experts_[id];
        const int      of_count = int(std::floor(std::log2(std::max(count(e), 1.0))));
        return -std::ldexp(double(n_uses_ - e.used), -std::min(of_count, N_CLASSES - 1));
    }

  private:
    struct expert {
        double   count   = 0; // when it was last used
        uint64_t counted = 0; // tokens at that time
        uint64_t used    = 0; // uses of any expert at that time
    };

    double count(const expert & e) const { return e.count * std::exp2(-double(n_tokens_ - e.counted) / HALF_LIFE); }

    expert_table<expert> experts_;
    uint64_t             n_tokens_ = 0;
    uint64_t             n_uses_   = 0; // of any expert
};

const auto registered = registered_policy::of<class_lru_policy>("class-lru");

} // namespace

} // namespace hobbit
