// SPDX-License-Identifier: MIT
#include "base/setting-table.h"
#include "policy/cache-policy.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

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
        const bool follows_prompt = std::exchange(is_prompt_, n > 1);
        if (is_prompt_) {
            in_prompt_.insert(sequence);
        } else {
            in_prompt_.erase(sequence);
            first_guest_ = follows_prompt ? n_inserts_ + 1 : first_guest_;
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

    uint64_t on_insert(expert_id) override { return ++n_inserts_; }

    bool admits(expert_id newcomer, expert_id victim) override {
        return is_prompt_ && value(newcomer, {}, {}) > SWAP_RATIO * value(victim, {}, {});
    }

    expert_id victim(const std::vector<candidate> & candidates) override {
        const double least = std::min_element(candidates.begin(), candidates.end())->value;
        const auto   rank  = [&](const candidate & c) {
            const bool is_guest = !is_prompt_ && c.inserted >= first_guest_;
            const bool is_least = c.value <= SWAP_RATIO * least;
            return std::tuple(is_guest, is_least, c.inserted);
        };
        const auto later = [&](const candidate & a, const candidate & b) { return rank(a) < rank(b); };
        return std::max_element(candidates.begin(), candidates.end(), later)->id;
    }

  private:
    const policy_options options_;
    usage_records        prompts_;                  // records of prompt batches only
    std::set<uint32_t>   in_prompt_;                // sequences whose current batch is of a prompt
    bool                 is_prompt_   = false;      // the current batch, of several sequences the last one's
    uint64_t             n_inserts_   = 0;          // in all pools
    uint64_t             first_guest_ = UINT64_MAX; // first insert for a token generated after the last prompt
};

const bool is_twiddler =
    register_paper({ "twiddler", "a GPU and a calibration", "t1=1 mode=twiddler policy=static prefetch=0" });

const registered_policy all[] = {
    registered_policy::of<static_policy>("static", { /* .needs_prior = */ true }),
    registered_policy::of<prompt_policy>("prompt"),
};

} // namespace

} // namespace hobbit
