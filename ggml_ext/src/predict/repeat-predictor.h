// SPDX-License-Identifier: MIT
#pragma once

#include "predict/predictor.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hobbit {

// Predicts that each token chooses the experts of the token before it: that a batch repeats the last rows of the
// previous one, sequence by sequence while the order of sequences stays. It needs routes alone, so that the simulator
// can run it, and is the baseline that other predictors are compared with.
class repeat_predictor final : public predictor {
  public:
    explicit repeat_predictor(size_t n_layers) : last_(n_layers) {}

    explicit repeat_predictor(const predictor_options & options) : repeat_predictor(options.n_experts.size()) {}

    void on_routing(const layer_routing & routing) override {
        last_[routing.layer] = routing;
        normalize(last_[routing.layer]);
    }

    status predict(const layer_routing & running, uint32_t n_ahead, const ggml_tensor *, ggml_backend_t,
                   std::vector<layer_routing> & predictions) override {
        predictions.clear();
        for (size_t layer = running.layer + 1; layer < last_.size() && predictions.size() < n_ahead; layer++) {
            const layer_routing & last = last_[layer];
            if (last.n_tokens == 0) {
                break;
            }
            const int64_t n_tokens = std::min(last.n_tokens, running.n_tokens);
            const auto    before   = ptrdiff_t((last.n_tokens - n_tokens) * last.n_used);
            predictions.push_back({ last.layer,
                                    n_tokens,
                                    last.n_used,
                                    { last.experts.begin() + before, last.experts.end() },
                                    { last.weights.begin() + before, last.weights.end() } });
        }
        return {};
    }

  private:
    std::vector<layer_routing> last_; // [layer]; no tokens: not run yet
};

} // namespace hobbit
