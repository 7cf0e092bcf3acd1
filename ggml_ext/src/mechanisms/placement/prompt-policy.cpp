// SPDX-License-Identifier: MIT
#include "policy/cache-policy.h"

#include <algorithm>
#include <set>
#include <tuple>

namespace hobbit {

namespace {

constexpr double SWAP_RATIO = 1.05; // DAOP, section IV-B

// DAOP's allocation (DATE 2025, Algorithm 1): an expert is worth the tokens of the sequence's prompt that chose
// it, of several sequences the most. A newcomer takes a place only from an expert with less than 1 / 1.05 of its
// tokens. While tokens are generated nothing changes places: what is loaded for a token is evicted first, the last one
// before others, and background loads are refused.
//
// Our choices where a cache differs from the paper: a batch of several tokens is part of a prompt, the pool is one for
// all layers, a demand always gets a slot, and of equal experts the one that earlier runs used more is worth more.
class prompt_policy : public cache_policy {
  public:
    explicit prompt_policy(const policy_options & options) :
        options_(options), prompts_(options.n_layers, options.n_experts) {}

    void begin_sequence(uint32_t sequence) override { prompts_.begin_sequence(sequence); }

    void begin_tokens(uint32_t sequence, uint32_t n) override {
        is_prompt_  = n > 1;
        n_prompts_ += is_prompt_;
        if (is_prompt_) {
            in_prompt_.insert(sequence);
        } else {
            in_prompt_.erase(sequence);
        }
        prompts_.begin_tokens(sequence, n);
    }

    void on_use(const expert_usage & use) override {
        if (in_prompt_.count(use.sequence) > 0) {
            prompts_.on_use(use);
        }
    }

    double value(expert_id id, tier_id, layer_id) override {
        const auto   uses   = [](const usage_record & r, uint32_t) { return double(r.n_uses); };
        const double before = options_.prior.empty() ? 0.0 : options_.prior[id];
        return prompts_.largest(id, uses) +
               before / 2.0; // before is at most 1 per token: less than a token of the prompt
    }

    std::unique_ptr<pool_policy> make_pool(tier_id tier) override { return std::make_unique<pool>(*this, tier); }

  private:
    class pool : public pool_policy {
      public:
        pool(prompt_policy & policy, tier_id tier) :
            pool_policy(policy, tier), prompts_(policy), inserts_(policy.options_.table<insert>()) {}

        void on_insert(expert_id id) override {
            inserts_[id] = { ++n_inserts_, prompts_.is_prompt_ ? 0 : prompts_.n_prompts_ };
        }

        bool admits(expert_id newcomer, expert_id victim) override {
            return prompts_.is_prompt_ && value(newcomer, {}) > SWAP_RATIO * value(victim, {});
        }

        expert_id victim(const std::vector<candidate> & candidates) override {
            const double least = std::min_element(candidates.begin(), candidates.end())->value;
            const auto   rank  = [&](const candidate & c) {
                const bool is_least = c.value <= SWAP_RATIO * least;
                return std::tuple(is_guest(c.id), is_least, inserts_[c.id].number);
            };
            const auto later = [&](const candidate & a, const candidate & b) { return rank(a) < rank(b); };
            return std::max_element(candidates.begin(), candidates.end(), later)->id;
        }

      private:
        struct insert {
            uint64_t number = 0;
            uint64_t after  = 0; // the last prompt, for a generated token; 0: in a prompt, or before the first one
        };

        // Returns true if it was inserted for a token that was generated after the last prompt.
        bool is_guest(expert_id id) const {
            return !prompts_.is_prompt_ && inserts_[id].after > 0 && inserts_[id].after == prompts_.n_prompts_;
        }

        const prompt_policy & prompts_;
        expert_table<insert>  inserts_;
        uint64_t              n_inserts_ = 0;
    };

    const policy_options options_;
    usage_records        prompts_;           // records of prompt batches only
    std::set<uint32_t>   in_prompt_;         // sequences whose current batch is of a prompt
    bool                 is_prompt_ = false; // the current batch, of several sequences the last one's
    uint64_t             n_prompts_ = 0;     // batches
};

const auto registered = registered_policy::of<prompt_policy>("prompt");

} // namespace

} // namespace hobbit
