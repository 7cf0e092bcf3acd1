// SPDX-License-Identifier: MIT
#include "policy/cache-policy.h"
#include "policy/token-memory.h"

#include <algorithm>
#include <cmath>

namespace hobbit {

namespace {

// Echo. An expert's value is its expected number of uses, with later tokens discounted. There are two estimates: one
// from how often the expert was used, one from what followed earlier tokens that were similar to the last one. The
// weight of the second estimate grows with the similarity. docs/policies.md has the formulas, and how the constants
// were fitted.
constexpr uint32_t n_rates              = 3;
constexpr double   retention[n_rates]   = { 0.25, 0.89, 0.973 }; // of a usage rate, per token
constexpr double   rate_weight[n_rates] = { 0.48, 0.6, 0.4 };    // in the expected rate
constexpr double   weight_power         = 0.45; // a use counts (its gate weight / the mean one) to this power
constexpr double   discount             = 0.76; // of a use, per token until then
constexpr double   sharpness            = 8.7;  // the larger, the more the most similar tokens count
constexpr double   prior_similarity     = 0.28; // a token counts more than the rates from this similarity on
constexpr double   past_retention       = 0.3;  // of the similarity of the tokens before, per token
constexpr double   trust_retention      = 0.87; // of the trust in what followed, per token
constexpr double   low_learning         = 0.5;  // rate at which an expert's share of low-precision uses is learned
constexpr double   low_worth            = 0.4;  // of a low-precision use to the high pool

constexpr uint32_t n_remembered = 256; // tokens
constexpr size_t   n_similar    = 32;  // of those, how many are followed
constexpr int      n_ahead      = 8;   // tokens, how far
constexpr uint64_t n_idle_max   = 256; // batches after which a sequence is forgotten

class echo_policy : public cache_policy {
  public:
    explicit echo_policy(const policy_options & options);

    void   begin_sequence(uint32_t sequence) override;
    void   begin_tokens(uint32_t sequence, uint32_t n) override;
    void   on_use(const expert_usage & use) override;
    double value(expert_id id, term_id term, layer_id layer) override;

  private:
    struct sequence {
        uint32_t           number;
        uint64_t           last_batch = 0;
        uint64_t           token      = token_memory::none; // that runs, or ran last; none: several at once
        std::vector<float> similar; // [slot] similarity to the running token, summed over the layers so far
        std::vector<float> past;    // [slot] similarity to the token before and, decayed, to earlier ones
    };

    using neighbour = std::pair<double, uint64_t>; // weight, token; the rest of the weights' sum to 1 goes to the rates

    size_t index(expert_id id) const { return size_t(id.layer) * n_experts_ + id.expert; }
    bool   runs(const sequence & s) const { return s.last_batch == n_batches_ && s.token != token_memory::none; }

    sequence & find(uint32_t number);
    void       begin_batch();
    void       begin_token(sequence & s);
    void       count(const expert_usage & use);
    void       look_ahead(const sequence & s);
    double     expected_rate(size_t i) const;
    double     share(size_t i, term_id term) const;

    std::vector<neighbour> find_similar(const std::vector<float> & scores, uint64_t except) const;

    const uint32_t n_layers_;
    const uint32_t n_experts_;
    const uint32_t n_used_;
    const bool     low_serves_all_; // a use in high precision takes the low pool as well

    token_memory          memory_;
    std::vector<sequence> sequences_;

    std::vector<float>  rates_[n_rates]; // [expert index] uses per token
    std::vector<double> expected_;       // [expert index] their weighted sum: every eviction asks for it
    std::vector<float>  low_share_;      // [expert index] of the uses
    std::vector<float>  later_; // [expert index] discounted uses after this token, by what followed similar ones
    std::vector<float>  now_;   // [expert index] uses in this token, by those of similar ones

    std::vector<uint64_t> counted_; // [layer] number of the last batch that is in the rates
    uint64_t              n_batches_    = 0;
    uint32_t              batch_tokens_ = 0;
    uint64_t              batch_first_  = 0;    // of the batch's tokens in memory
    bool                  in_layers_    = true; // the batch runs; false: its sequences are still being announced
    double                now_weight_   = 0.0;  // of the expected rate in this token
    double                later_weight_ = 0.0;  // of the expected rate in what comes after this token
};

echo_policy::echo_policy(const policy_options & options) :
    n_layers_(options.n_layers),
    n_experts_(options.n_experts),
    n_used_(options.n_used),
    low_serves_all_(options.terms[tier_id::high].size() > 1),
    memory_(options.n_layers, options.n_experts, options.n_used, n_remembered),
    counted_(options.n_layers, 0) {
    const size_t n = size_t(n_layers_) * n_experts_;
    expected_.assign(n, 0.0);
    for (auto * values : { &rates_[0], &rates_[1], &rates_[2], &low_share_, &later_, &now_ }) {
        values->assign(n, 0.0f);
    }
}

void echo_policy::begin_sequence(uint32_t number) {
    sequence & s = find(number);
    s.token      = token_memory::none;
}

void echo_policy::begin_tokens(uint32_t number, uint32_t n) {
    if (in_layers_) {
        begin_batch();
    }
    batch_tokens_ += n;
    now_weight_   += 1;
    later_weight_ += discount / (1 - discount);
    sequence & s   = find(number);
    s.last_batch   = n_batches_;
    if (n == 1) {
        begin_token(s);
        look_ahead(s);
    } else {
        s.token = token_memory::none;
    }
}

void echo_policy::begin_batch() {
    in_layers_    = false;
    batch_tokens_ = 0;
    n_batches_++;
    const auto is_idle = [&](const sequence & s) { return n_batches_ - s.last_batch > n_idle_max; };
    sequences_.erase(std::remove_if(sequences_.begin(), sequences_.end(), is_idle), sequences_.end());
    std::fill(now_.begin(), now_.end(), 0.0f);
    std::fill(later_.begin(), later_.end(), 0.0f);
    now_weight_   = 0.0;
    later_weight_ = 0.0;
    batch_first_  = memory_.last();
}

echo_policy::sequence & echo_policy::find(uint32_t number) {
    const auto found =
        std::find_if(sequences_.begin(), sequences_.end(), [&](const sequence & s) { return s.number == number; });
    if (found != sequences_.end()) {
        return *found;
    }
    sequence s;
    s.number     = number;
    s.last_batch = n_batches_;
    for (auto * scores : { &s.similar, &s.past }) {
        scores->assign(n_remembered, 0.0f);
    }
    sequences_.push_back(std::move(s));
    return sequences_.back();
}

// The token before is complete: its similarities become the past of the next one.
void echo_policy::begin_token(sequence & s) {
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
    for (sequence & other : sequences_) {
        other.similar[n] = other.past[n] = 0.0f; // the slot's old token is forgotten
    }
    std::fill(s.similar.begin(), s.similar.end(), 0.0f);
}

// The complete tokens with the highest scores, without `except`.
std::vector<echo_policy::neighbour> echo_policy::find_similar(const std::vector<float> & scores,
                                                              uint64_t                   except) const {
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

// Adds what followed the tokens that are similar to the one before: first the counterpart of this token, then those
// after it.
void echo_policy::look_ahead(const sequence & s) {
    const uint64_t before = memory_.before(s.token);
    if (before == token_memory::none) {
        return;
    }
    for (const neighbour & other : find_similar(s.past, before)) {
        uint64_t token = memory_.after(other.second);
        double   trust = other.first;
        for (int ahead = 0; ahead <= n_ahead && token < batch_first_; ahead++) {
            auto & uses    = ahead == 0 ? now_ : later_;
            auto & weight  = ahead == 0 ? now_weight_ : later_weight_;
            weight        -= trust;
            memory_.visit_uses(token, 0, [&](size_t i) { uses[i] += float(trust); });
            token  = memory_.after(token);
            trust *= discount * trust_retention;
        }
    }
}

void echo_policy::on_use(const expert_usage & use) {
    in_layers_ = true;
    count(use);
    sequence & s = find(use.sequence);
    if (runs(s)) {
        memory_.add_similarity(use.id, use.weight, s.similar);
        memory_.use(s.token, use.id, use.weight);
    }
}

void echo_policy::count(const expert_usage & use) {
    const uint32_t n        = std::max(batch_tokens_, 1u);
    const double   relative = use.weight / use.n_tokens * n_used_;
    const double   counts   = use.n_tokens * std::pow(std::max(relative, 0.0), weight_power) / n;
    for (uint32_t r = 0; r < n_rates; r++) {
        const double kept  = std::pow(retention[r], n);
        float *      rates = &rates_[r][size_t(use.id.layer) * n_experts_];
        if (counted_[use.id.layer] != n_batches_) {
            std::for_each(rates, rates + n_experts_, [&](float & rate) { rate *= float(kept); });
        }
        rates[use.id.expert] += float((1 - kept) * counts);
    }
    if (counted_[use.id.layer] != n_batches_) {
        const size_t first = index({ use.id.layer, 0 });
        for (size_t i = first; i < first + n_experts_; i++) {
            expected_[i] = expected_rate(i);
        }
    }
    expected_[index(use.id)]  = expected_rate(index(use.id));
    counted_[use.id.layer]    = n_batches_;
    float & low               = low_share_[index(use.id)];
    low                      += float(low_learning) * ((use.tier == tier_id::low ? 1.0f : 0.0f) - low);
}

double echo_policy::expected_rate(size_t i) const {
    double rate = 0.0;
    for (uint32_t r = 0; r < n_rates; r++) {
        rate += rate_weight[r] * rates_[r][i];
    }
    return rate;
}

// Of the uses, those that the pool serves.
double echo_policy::share(size_t i, term_id term) const {
    if (low_serves_all_) {
        return term == term_id::low ? 1 : 1 - low_share_[i];
    }
    return term == term_id::low ? low_share_[i] : 1 - (1 - low_worth) * low_share_[i];
}

double echo_policy::value(expert_id id, term_id term, layer_id layer) {
    const size_t i    = index(id);
    const double rate = expected_[i];
    double       uses = later_weight_ * rate + later_[i];
    if (id.layer > layer) {
        uses += now_weight_ * rate + now_[i];
    }
    return uses * share(i, term);
}

const auto registered = registered_policy::of<echo_policy>("echo");

} // namespace

} // namespace hobbit
