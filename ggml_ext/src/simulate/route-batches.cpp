// SPDX-License-Identifier: MIT
#include "simulate/route-batches.h"

#include <algorithm>
#include <set>

namespace hobbit {

namespace {

class batch_finder {
  public:
    batch_finder(const hobbit_route * routes, size_t n_routes, const hobbit_simulation & options) :
        routes_(routes), n_routes_(n_routes), options_(options) {}

    status find(std::vector<route_batch> & batches) {
        for (size_t i = 0; i < n_routes_; i += n_used_in(options_, routes_[i].layer)) {
            HOBBIT_TRY(check_experts(i));
            if (i == 0 || ends_batch(i)) {
                end_batch();
                batches.emplace_back();
                batches.back().first = i;
            }
            HOBBIT_TRY(add_token(i, batches.back()));
        }
        return {};
    }

  private:
    // A sequence's progress in the batch.
    struct progress {
        int32_t largest; // token
        int32_t last;    // token of the last layer
        int32_t layer;
        bool    counted;
    };

    status wrong(size_t i, const std::string & what) const {
        const hobbit_route & r = routes_[i];
        return status::error("route %zu (sequence %d, token %d, layer %d): %s", i, r.sequence, r.token, r.layer,
                             what.c_str());
    }

    // The experts of one token and layer.
    status check_experts(size_t first) const {
        const hobbit_route & token = routes_[first];
        if (token.layer < 0 || uint32_t(token.layer) >= options_.n_layers) {
            return wrong(first, format("the model has %u layers", options_.n_layers));
        }
        const uint32_t n_used = n_used_in(options_, token.layer);
        for (size_t i = first; i < first + n_used; i++) {
            const bool same = i < n_routes_ && routes_[i].sequence == token.sequence &&
                              routes_[i].token == token.token && routes_[i].layer == token.layer &&
                              routes_[i].counted == token.counted;
            if (!same) {
                return wrong(first, format("a token has %zu routes in a layer, not %u", i - first, n_used));
            }
            if (routes_[i].expert < 0 || uint32_t(routes_[i].expert) >= options_.n_experts) {
                return wrong(i, format("there is no expert %d among %u", routes_[i].expert, options_.n_experts));
            }
            for (size_t j = first; j < i; j++) {
                if (routes_[j].expert == routes_[i].expert) {
                    return wrong(i, format("expert %d appears twice", routes_[i].expert));
                }
            }
        }
        return {};
    }

    bool ends_batch(size_t i) const {
        const hobbit_route & r = routes_[i];
        if (r.layer < routes_[i - 1].layer) {
            return true;
        }
        const auto it = batch_.find(r.sequence);
        return it != batch_.end() && it->second.largest != r.token && (it->second.counted || r.counted);
    }

    void end_batch() {
        for (const auto & [sequence, p] : batch_) {
            past_[sequence] = p.largest;
        }
        batch_.clear();
        tokens_.clear();
    }

    status add_token(size_t i, route_batch & batch) {
        const hobbit_route & r    = routes_[i];
        const auto           past = past_.find(r.sequence);
        const auto [it, is_new]   = batch_.emplace(r.sequence, progress{ r.token, r.token, r.layer, r.counted != 0 });
        progress & p              = it->second;
        const bool repeats        = past != past_.end() && r.token <= past->second;
        const bool goes_back      = !is_new && r.layer == p.layer && r.token <= p.last;
        if (repeats || goes_back) {
            return wrong(i, "the order goes backwards; sort the routes by token, layer and rank");
        }
        p = { std::max(p.largest, r.token), r.token, r.layer, r.counted != 0 };
        if (is_new && past == past_.end()) {
            batch.begins.push_back(r.sequence);
        }
        if (tokens_.insert({ r.sequence, r.token }).second) {
            batch.n_tokens[r.sequence]++;
            batch.n_counted += r.counted != 0;
        }
        batch.last = i + n_used_in(options_, r.layer);
        return {};
    }

    const hobbit_route *                  routes_;
    const size_t                          n_routes_;
    const hobbit_simulation &             options_;
    std::map<int32_t, int32_t>            past_;   // [sequence] largest token of earlier batches
    std::map<int32_t, progress>           batch_;  // [sequence]
    std::set<std::pair<int32_t, int32_t>> tokens_; // tokens of the batch
};

void number_sequences(std::vector<route_batch> & batches) {
    std::map<int32_t, size_t> end; // [sequence] its last batch
    for (size_t i = 0; i < batches.size(); i++) {
        for (const auto & entry : batches[i].n_tokens) {
            end[entry.first] = i;
        }
    }
    std::map<int32_t, uint32_t> numbers; // in use
    std::set<uint32_t>          free;
    uint32_t                    n_numbers = 0;
    for (size_t i = 0; i < batches.size(); i++) {
        for (const int32_t sequence : batches[i].begins) {
            if (free.empty()) {
                free.insert(n_numbers++);
            }
            numbers[sequence] = *free.begin();
            free.erase(free.begin());
        }
        for (const auto & entry : batches[i].n_tokens) {
            const uint32_t number           = numbers[entry.first];
            batches[i].numbers[entry.first] = number;
            if (end[entry.first] == i) {
                free.insert(number);
            }
        }
    }
}

} // namespace

status find_batches(const hobbit_route * routes, size_t n_routes, const hobbit_simulation & options,
                    std::vector<route_batch> & batches) {
    batches.clear();
    HOBBIT_TRY(batch_finder(routes, n_routes, options).find(batches));
    number_sequences(batches);
    return {};
}

} // namespace hobbit
