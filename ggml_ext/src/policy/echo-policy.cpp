// SPDX-License-Identifier: MIT
#include "policy/cache-policy.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace hobbit {

namespace {

// Echo. An expert's value is its expected number of uses, with later tokens discounted. There are two estimates: one
// from how often the expert was used, one from what followed earlier tokens that were similar to the last one. The
// weight of the second estimate grows with the similarity. docs/policies.md has the formulas, and how the constants
// were fitted.
constexpr uint32_t n_rates              = 3;
constexpr double   retention[n_rates]   = { 0.25, 0.89, 0.973 }; // share of a usage rate that a token keeps
constexpr double   rate_weight[n_rates] = { 0.48, 0.6, 0.4 };    // in the expected rate
constexpr double   weight_power         = 0.45; // a use counts (its gate weight / the mean one) to this power
constexpr double   discount             = 0.76; // worth of a use, per token of waiting
constexpr double   sharpness            = 8.7;  // the larger, the more the most similar tokens count
constexpr double   prior_similarity     = 0.28; // a token counts more than the rates from this similarity on
constexpr double   past_retention       = 0.3;  // share of the earlier tokens' similarity, per token
constexpr double   trust_retention      = 0.87; // share of the trust in the successors, per token
constexpr double   low_learning         = 0.5;  // rate at which an expert's share of low-precision uses is learned
constexpr double   low_worth            = 0.4;  // worth of a low-precision use to the high pool

constexpr uint32_t n_remembered = 256; // tokens
constexpr size_t   n_similar    = 32;  // how many of those are followed
constexpr int      n_ahead      = 8;   // tokens, how far

class echo_policy : public cache_policy {
  public:
    explicit echo_policy(const policy_options & options) :
        n_layers_(options.n_layers),
        n_experts_(options.n_experts),
        memory_(options.n_layers, options.n_experts, options.n_used, n_remembered),
        experts_(options.table<estimate>()),
        counted_(options.n_layers, 0) {
        for (size_t i = 0; i < options.prior.size(); i++) {
            const expert_id id = options.prior.id(i);
            std::fill(experts_[id].rates, experts_[id].rates + n_rates, options.prior[id]);
            experts_[id].add_up();
        }
    }

    void begin_sequence(uint32_t number) override { sequences_[number].token = token_memory::none; }
    void begin_tokens(uint32_t number, uint32_t n) override {
        if (in_layers_) {
            begin_batch();
        }
        batch_tokens_ += n;
        now_weight_   += 1;
        later_weight_ += discount / (1 - discount);
        sequence & s   = sequences_[number];
        s.last_batch   = n_batches_;
        if (n == 1) {
            begin_token(s);
            look_ahead(s);
        } else {
            s.token = token_memory::none;
        }
    }

    void on_use(const expert_usage & use) override {
        in_layers_ = true;
        count(use);
        sequence & s = sequences_[use.sequence];
        if (runs(s)) {
            memory_.add_similarity(use.id, use.weight, s.similar);
            memory_.use(s.token, use.id, use.weight);
        }
    }

    double value(expert_id id, tier_id tier, layer_id layer) override {
        const estimate & e    = experts_[id];
        double           uses = later_weight_ * e.expected + e.later;
        if (id.layer > layer) {
            uses += now_weight_ * e.expected + e.now;
        }
        return uses * share(e, tier);
    }

  private:
    struct estimate {
        float  rates[n_rates] = {};   // uses per token
        double expected       = 0.0;  // their weighted sum: every eviction asks for it
        float  low_share      = 0.0f; // share of the uses
        float  later          = 0.0f; // discounted uses after this token, by what followed similar ones
        float  now            = 0.0f; // uses in this token, by those of similar ones

        void add_up() { expected = std::inner_product(rates, rates + n_rates, rate_weight, 0.0); }
    };

    using similarities = std::vector<float>; // [slot]

    struct sequence {
        uint64_t     last_batch = 0;
        uint64_t     token      = token_memory::none;         // token that runs, or ran last; none: several at once
        similarities similar    = similarities(n_remembered); // to the running token, summed over the layers so far
        similarities past       = similarities(n_remembered); // to the token before and, decayed, to earlier ones
    };

    using neighbour = std::pair<double, uint64_t>; // weight, token; the rest of the weights' sum to 1 goes to the rates

    bool runs(const sequence & s) const { return s.last_batch == n_batches_ && s.token != token_memory::none; }

    void begin_batch() {
        in_layers_    = false;
        batch_tokens_ = 0;
        n_batches_++;
        for (estimate & e : experts_) {
            e.now = e.later = 0.0f;
        }
        now_weight_   = 0.0;
        later_weight_ = 0.0;
        batch_first_  = memory_.last();
    }

    // The token before is complete: its similarities become the past of the next one.
    void begin_token(sequence & s) {
        const bool         follows = memory_.remembers(s.token);
        std::vector<float> past(n_remembered, 0.0f);
        for (uint64_t token = memory_.first(); follows && token < memory_.last(); token++) {
            const uint64_t before     = memory_.before(token);
            past[memory_.slot(token)] = s.similar[memory_.slot(token)] / float(n_layers_);
            if (before != token_memory::none) {
                past[memory_.slot(token)] += float(past_retention) * s.past[memory_.slot(before)];
            }
        }
        s.past           = past;
        s.token          = memory_.add(follows ? s.token : token_memory::none);
        const uint32_t n = memory_.slot(s.token);
        for (auto & [number, other] : sequences_) {
            other.similar[n] = other.past[n] = 0.0f; // the slot's old token is forgotten
        }
        std::fill(s.similar.begin(), s.similar.end(), 0.0f);
    }

    void count(const expert_usage & use) {
        const uint32_t n        = std::max(batch_tokens_, 1u);
        const double   relative = use.weight / use.n_tokens * use.n_used;
        const double   counts   = use.n_tokens * std::pow(std::max(relative, 0.0), weight_power) / n;
        double         kept[n_rates];
        for (uint32_t r = 0; r < n_rates; r++) {
            kept[r] = std::pow(retention[r], n);
        }
        for (uint32_t i = 0; i < n_experts_ && counted_[use.id.layer] != n_batches_; i++) {
            estimate & e = experts_[{ use.id.layer, i }];
            for (uint32_t r = 0; r < n_rates; r++) {
                e.rates[r] *= float(kept[r]);
            }
            e.add_up();
        }
        counted_[use.id.layer] = n_batches_;
        estimate & used        = experts_[use.id];
        for (uint32_t r = 0; r < n_rates; r++) {
            used.rates[r] += float((1 - kept[r]) * counts);
        }
        used.add_up();
        used.low_share += float(low_learning) * ((use.tier == tier_id::low ? 1.0f : 0.0f) - used.low_share);
    }

    // Adds what followed the tokens that are similar to the one before: first the counterpart of this token, then those
    // after it.
    void look_ahead(const sequence & s) {
        const uint64_t before = memory_.before(s.token);
        if (before == token_memory::none) {
            return;
        }
        for (const neighbour & other : find_similar(s.past, before)) {
            uint64_t token = memory_.after(other.second);
            double   trust = other.first;
            for (int ahead = 0; ahead <= n_ahead && token < batch_first_; ahead++) {
                const auto uses    = ahead == 0 ? &estimate::now : &estimate::later;
                auto &     weight  = ahead == 0 ? now_weight_ : later_weight_;
                weight            -= trust;
                memory_.visit_uses(token, [&](expert_id id) { experts_[id].*uses += float(trust); });
                token  = memory_.after(token);
                trust *= discount * trust_retention;
            }
        }
    }

    // Share of the uses that the pool serves.
    double share(const estimate & e, tier_id tier) const {
        return tier == tier_id::low ? e.low_share : 1 - (1 - low_worth) * e.low_share;
    }

    // The complete tokens with the highest scores, without `except`.
    std::vector<neighbour> find_similar(const std::vector<float> & scores, uint64_t except) const {
        std::vector<neighbour> found;
        for (uint64_t token = memory_.first(); token < batch_first_; token++) {
            if (token != except) {
                found.push_back({ sharpness * scores[memory_.slot(token)], token });
            }
        }
        const auto better = [](const neighbour & a, const neighbour & b) { return a > b; };
        const auto n      = std::min(found.size(), n_similar);
        std::partial_sort(found.begin(), found.begin() + ptrdiff_t(n), found.end(), better);
        found.resize(n);
        const double unlike = sharpness * prior_similarity;
        const double most   = n > 0 ? std::max(found[0].first, unlike) : unlike;
        double       sum    = std::exp(unlike - most);
        for (neighbour & other : found) {
            other.first  = std::exp(other.first - most);
            sum         += other.first;
        }
        for (neighbour & other : found) {
            other.first /= sum;
        }
        return found;
    }

    const uint32_t n_layers_;
    const uint32_t n_experts_;

    token_memory                 memory_;
    std::map<uint32_t, sequence> sequences_; // [number]
    expert_table<estimate>       experts_;

    std::vector<uint64_t> counted_; // [layer] number of the last batch that is in the rates
    uint64_t              n_batches_    = 0;
    uint32_t              batch_tokens_ = 0;
    uint64_t              batch_first_  = 0;    // first of the batch's tokens in memory
    bool                  in_layers_    = true; // the batch runs; false: its sequences are still being announced
    double                now_weight_   = 0.0;  // weight of the expected rate in this token
    double                later_weight_ = 0.0;  // weight of the expected rate after this token
};

const auto registered = registered_policy::of<echo_policy>("echo");

} // namespace

} // namespace hobbit
