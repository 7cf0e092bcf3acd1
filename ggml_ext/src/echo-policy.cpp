// SPDX-License-Identifier: MIT
#include "expert-index.h"
#include "policies.h"
#include "token-memory.h"

#include <algorithm>
#include <cmath>

namespace hobbit {

namespace {

// Fitted: docs/policies.md says how.
constexpr uint32_t n_rates             = 3;
constexpr double   retention[n_rates]  = { 0.6, 0.9, 0.98 }; // of a usage rate, per token
constexpr double   rate_share[n_rates] = { 0.2, 0.4, 0.4 };  // in the mean rate
constexpr double   weight_power   = 0.5; // a use counts as its share of the weight, relative to the mean, to this power
constexpr double   discount       = 0.88;  // of a use, per token until then
constexpr double   past_retention = 0.3;   // of the likeness of preceding tokens, per token
constexpr double   step_sharpness = 6.0;   // how much likeness counts among complete tokens
constexpr double   step_trust     = 0.5;   // in what followed them, against the mean rates
constexpr double   step_retention = 0.9;   // of that trust, per token
constexpr double   layer_retention = 0.9;  // of the likeness in preceding layers, per layer
constexpr double   layer_sharpness = 10.0; // how much likeness counts in the layers so far
constexpr double   layer_trust     = 0.6;  // in what those tokens used, against the mean rates
constexpr double   low_learning    = 0.1;  // rate at which an expert's share of low-precision uses is learned
constexpr double   low_worth       = 0.5;  // of a low-precision use to the high pool

constexpr uint32_t n_remembered = 256; // tokens
constexpr size_t   n_alike      = 16;  // of those, how many are followed
constexpr int      n_ahead      = 8;   // tokens, how far
constexpr uint64_t n_idle_max   = 256; // batches after which a sequence is forgotten

class echo_policy : public cache_policy {
  public:
    explicit echo_policy(const policy_options & options);

    void   begin_sequence(uint32_t sequence) override;
    void   begin_tokens(uint32_t sequence, uint32_t n) override;
    void   on_use(const expert_usage & use) override;
    double value(expert_id id, uint32_t tier, uint32_t layer) override;

  private:
    struct sequence {
        uint32_t           number;
        uint64_t           last_batch = 0;
        uint64_t           token      = token_memory::none; // that runs, or ran last; none: it came in a batch
        uint32_t           layer      = 0;                  // that was counted last
        double             norm       = 0.0;                // of `recent`
        std::vector<float> recent;                          // [slot] likeness in the layers so far, decayed
        std::vector<float> total;                           // [slot] likeness in the layers so far, summed
        std::vector<float> past;                            // [slot] likeness up to the token before, decayed
    };

    using neighbour = std::pair<double, uint64_t>; // weight, token; weights sum to 1

    size_t index(expert_id id) const { return size_t(id.layer) * n_experts_ + id.expert; }
    bool   runs(const sequence & s) const { return s.last_batch == n_batches_ && s.token != token_memory::none; }

    sequence & find(uint32_t number);
    void       begin_batch();
    void       begin_token(sequence & s);
    void       count(const expert_usage & use);
    void       compare(sequence & s, const expert_usage & use);
    void       look_ahead(const sequence & s);
    void       look_on(uint32_t layer);
    double     mean_rate(size_t i) const;

    std::vector<neighbour> find_alike(const std::vector<float> & scores, double scale, uint64_t except) const;

    const uint32_t n_layers_;
    const uint32_t n_experts_;
    const uint32_t n_used_;

    token_memory          memory_;
    std::vector<sequence> sequences_;

    std::vector<float> rates_[n_rates]; // [expert index] uses per token
    std::vector<float> low_share_;      // [expert index] of the uses
    std::vector<float> later_;          // [expert index] discounted uses after this token, as followed on those like it
    std::vector<float> now_;            // [expert index] uses in this token, as those like it had

    std::vector<uint64_t> counted_; // [layer] the last batch that was
    uint64_t              n_batches_    = 0;
    uint32_t              batch_tokens_ = 0;
    uint32_t              n_parallel_   = 0;    // sequences of the batch
    uint64_t              batch_first_  = 0;    // of the batch's tokens in memory
    bool                  in_layers_    = true; // of the batch, not before them
    bool                  now_is_old_   = false;
    double                later_weight_ = 0.0; // of the mean rate in what comes after this token
};

echo_policy::echo_policy(const policy_options & options) :
    n_layers_(options.n_layers),
    n_experts_(options.n_experts),
    n_used_(options.n_used),
    memory_(options.n_layers, options.n_experts, options.n_used, n_remembered),
    counted_(options.n_layers, 0) {
    const size_t n = size_t(n_layers_) * n_experts_;
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
    n_parallel_++;
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
    now_is_old_   = true;
    batch_tokens_ = 0;
    n_batches_++;
    const auto is_idle = [&](const sequence & s) { return n_batches_ - s.last_batch > n_idle_max; };
    sequences_.erase(std::remove_if(sequences_.begin(), sequences_.end(), is_idle), sequences_.end());
    std::fill(later_.begin(), later_.end(), 0.0f);
    later_weight_ = 0.0;
    n_parallel_   = 0;
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
    for (auto * scores : { &s.recent, &s.total, &s.past }) {
        scores->assign(n_remembered, 0.0f);
    }
    sequences_.push_back(std::move(s));
    return sequences_.back();
}

// The token before is complete now: what it was like becomes the past of the next one.
void echo_policy::begin_token(sequence & s) {
    const bool         follows = memory_.remembers(s.token);
    std::vector<float> past(n_remembered, 0.0f);
    for (uint64_t token = memory_.first(); follows && token < memory_.last(); token++) {
        const uint64_t before     = memory_.before(token);
        past[memory_.slot(token)] = s.total[memory_.slot(token)] / float(n_layers_);
        if (before != token_memory::none) {
            past[memory_.slot(token)] += float(past_retention) * s.past[memory_.slot(before)];
        }
    }
    s.past           = past;
    s.token          = memory_.add(follows ? s.token : token_memory::none);
    s.norm           = 0.0;
    s.layer          = UINT32_MAX;
    const uint32_t n = memory_.slot(s.token);
    for (sequence & other : sequences_) {
        other.recent[n] = other.total[n] = other.past[n] = 0.0f; // the slot's old token is forgotten
    }
    std::fill(s.recent.begin(), s.recent.end(), 0.0f);
    std::fill(s.total.begin(), s.total.end(), 0.0f);
}

// The tokens with the highest scores, of complete tokens but for one.
std::vector<echo_policy::neighbour> echo_policy::find_alike(const std::vector<float> & scores, double scale,
                                                            uint64_t except) const {
    std::vector<neighbour> alike;
    for (uint64_t token = memory_.first(); token < batch_first_; token++) {
        if (token != except) {
            alike.push_back({ scale * scores[memory_.slot(token)], token });
        }
    }
    const auto better = [](const neighbour & a, const neighbour & b) { return a > b; };
    const auto n      = std::min(alike.size(), n_alike);
    std::partial_sort(alike.begin(), alike.begin() + ptrdiff_t(n), alike.end(), better);
    alike.resize(n);
    double       sum  = 0.0;
    const double most = n > 0 ? alike[0].first : 0.0;
    for (neighbour & other : alike) {
        other.first  = std::exp(other.first - most);
        sum         += other.first;
    }
    for (neighbour & other : alike) {
        other.first /= sum;
    }
    return alike;
}

// What the tokens that were like the one before were followed by, from the second token on: the first is this one.
void echo_policy::look_ahead(const sequence & s) {
    const uint64_t before = memory_.before(s.token);
    if (before == token_memory::none) {
        return;
    }
    for (const neighbour & other : find_alike(s.past, step_sharpness, before)) {
        uint64_t token = memory_.after(other.second);
        double   trust = step_trust * other.first;
        for (int ahead = 1; ahead <= n_ahead && token != token_memory::none; ahead++) {
            token  = memory_.after(token);
            trust *= discount * step_retention;
            if (token == token_memory::none || token >= batch_first_) {
                break;
            }
            later_weight_ -= trust;
            memory_.visit_uses(token, 0, [&](size_t i) { later_[i] += float(trust); });
        }
    }
}

void echo_policy::on_use(const expert_usage & use) {
    in_layers_  = true;
    now_is_old_ = true;
    count(use);
    sequence & s = find(use.sequence);
    if (runs(s)) {
        compare(s, use);
    }
}

void echo_policy::count(const expert_usage & use) {
    const uint32_t n        = batch_tokens_;
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
    counted_[use.id.layer]  = n_batches_;
    float & low             = low_share_[index(use.id)];
    low                    += float(low_learning) * ((use.tier == TIER_LOW ? 1.0f : 0.0f) - low);
}

void echo_policy::compare(sequence & s, const expert_usage & use) {
    if (s.layer != use.id.layer) {
        s.layer = use.id.layer;
        s.norm  = s.norm * layer_retention + 1.0;
        std::for_each(s.recent.begin(), s.recent.end(), [](float & score) { score *= float(layer_retention); });
    }
    memory_.add_likeness(use.id, use.weight, s.recent);
    memory_.add_likeness(use.id, use.weight, s.total);
    memory_.use(s.token, use.id, use.weight);
}

// What the tokens that are like those that run used in the layers still to come.
void echo_policy::look_on(uint32_t layer) {
    now_is_old_ = false;
    std::fill(now_.begin(), now_.end(), 0.0f);
    for (const sequence & s : sequences_) {
        if (!runs(s) || s.norm == 0.0 || layer + 1 == n_layers_) {
            continue;
        }
        for (const neighbour & other : find_alike(s.recent, layer_sharpness / s.norm, token_memory::none)) {
            memory_.visit_uses(other.second, layer + 1, [&](size_t i) { now_[i] += float(other.first); });
        }
    }
}

double echo_policy::mean_rate(size_t i) const {
    double mean = 0.0;
    for (uint32_t r = 0; r < n_rates; r++) {
        mean += rate_share[r] * rates_[r][i];
    }
    return mean;
}

double echo_policy::value(expert_id id, uint32_t tier, uint32_t layer) {
    if (now_is_old_) {
        look_on(layer);
    }
    const size_t i    = index(id);
    const double rate = mean_rate(i);
    double       uses = later_weight_ * rate + later_[i];
    if (id.layer > layer) {
        uses += layer_trust * now_[i] + (1 - layer_trust) * n_parallel_ * rate;
    }
    return uses * (tier == TIER_LOW ? low_share_[i] : 1 - (1 - low_worth) * low_share_[i]);
}

} // namespace

std::unique_ptr<cache_policy> make_echo(const policy_options & options) {
    return std::make_unique<echo_policy>(options);
}

} // namespace hobbit
