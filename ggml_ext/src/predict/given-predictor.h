// SPDX-License-Identifier: MIT
#pragma once

#include "predict/predictor.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hobbit {

// The choices that a caller expects of the next batch; see hobbit_set_prediction. Empty: none is known.
struct given_routing {
    int64_t              n_tokens = 0;
    int64_t              n_used   = 0;
    uint32_t             n_ahead  = 0;
    std::vector<int32_t> experts; // [ahead][token][layer][rank]
    std::vector<float>   weights; // likewise
};

// Predicts what a caller said of the batch: for measurements under a replayed routing, which no predictor can know. If
// a layer computes fewer tokens than the batch has, they are the last tokens.
class given_predictor final : public predictor {
  public:
    // REQUIRES: options.given outlives the predictor; it may be null, and then nothing is known.
    explicit given_predictor(const predictor_options & options) :
        given_(options.given), n_layers_(options.n_experts.size()) {}

    bool knows(layer_id) const override { return given_ != nullptr; }
    bool accepts(const ggml_tensor *) const override { return given_ != nullptr; }

    status predict(const layer_routing & running, uint32_t n_ahead, const ggml_tensor *, ggml_backend_t,
                   std::vector<layer_routing> & predictions) override {
        predictions.clear();
        if (running.n_tokens > given_->n_tokens || running.n_used != given_->n_used) {
            return {};
        }
        for (uint32_t ahead = 1; ahead <= std::min(n_ahead, given_->n_ahead); ahead++) {
            const size_t layer = size_t(running.layer) + ahead;
            if (layer < n_layers_) {
                predictions.push_back({ layer_id(layer), running.n_tokens, running.n_used, {}, {} });
                copy(ahead - 1, predictions.back());
            }
        }
        return {};
    }

  private:
    void copy(uint32_t ahead, layer_routing & to) const {
        for (int64_t token = given_->n_tokens - to.n_tokens; token < given_->n_tokens; token++) {
            const size_t row   = size_t(ahead) * size_t(given_->n_tokens) + size_t(token);
            const auto   first = ptrdiff_t((row * n_layers_ + size_t(to.layer)) * size_t(given_->n_used));
            const auto   end   = first + ptrdiff_t(given_->n_used);
            to.experts.insert(to.experts.end(), given_->experts.begin() + first, given_->experts.begin() + end);
            to.weights.insert(to.weights.end(), given_->weights.begin() + first, given_->weights.begin() + end);
        }
    }

    const given_routing * const given_;
    const size_t                n_layers_;
};

} // namespace hobbit
