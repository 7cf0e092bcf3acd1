// SPDX-License-Identifier: MIT
#pragma once

#include "base/registered.h"
#include "base/status.h"
#include "ggml-backend.h"
#include "hobbit.h"
#include "plan/layer-plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hobbit {

// Parameters of a predictor; see registered_predictor.
struct predictor_options {
    std::string                name = "router";
    std::vector<uint32_t>      n_experts;    // [layer]
    std::vector<uint32_t>      n_used;       // [layer], of a token; empty: as the running one
    std::vector<int32_t>       paths;        // paths that a calibration stores, for each_path()
    uint32_t                   width  = 0;   // numbers in a router's input
    double                     bar    = 0.0; // smallest probability that is predicted, where the predictor knows one
    ggml_backend_buffer_type_t memory = ggml_backend_cpu_buffer_type(); // buffer type of the device that computes
};

// Names the experts that the layers after the running one will choose. A file of its own registers a predictor.
//
// Order of calls: set_router before the first batch; then, layer by layer in each batch, on_routing, and after it
// predict where a prediction is wanted.
//
// Thread-safety: none.
class predictor {
  public:
    virtual ~predictor() = default;

    // Gives the predictor a layer's router, which it copies if it needs it. Fails without memory for the copy.
    virtual status set_router(layer_id, const hobbit_router &) { return {}; }

    // Bytes that the predictor keeps, or will keep of the routers that it has not got yet: in the device's memory, or
    // in tables of its own in host memory, which then count as if they were in the device's.
    virtual size_t bytes() const { return 0; }

    // Returns true if the layer can be predicted, now that all known routers are set.
    virtual bool knows(layer_id /* layer */) const { return true; }

    // Returns true if it can predict from this router input, a tensor of the outer graph; null where that is not known,
    // as in the simulator.
    virtual bool accepts(const ggml_tensor * /* router_input */) const { return true; }

    // Tells the choices of a layer's router. Called for every layer that runs, also while prefetch pauses.
    virtual void on_routing(const layer_routing & /* routing */) {}

    // Begins to compute what predict() needs for these arguments, behind what the backend runs, and returns the tensor
    // whose bytes end() takes once it is computed; null: there is nothing to begin. May be left out.
    virtual const ggml_tensor * begin(layer_id /* running */, uint32_t /* n_ahead */,
                                      const ggml_tensor * /* router_input */, ggml_backend_t /* backend */) {
        return nullptr;
    }
    virtual void end(const char * /* bytes */) {}

    // Predicts what up to n_ahead layers after `running` choose, in their order, up to the first one that is not known:
    // for each token distinct experts, best first, with weights of sum 1. A prediction may have fewer tokens than
    // `running`. An error ends the computation of the batch.
    // REQUIRES: on_routing(running) was called last; accepts(router_input), which has a row for each token.
    virtual status predict(const layer_routing & running, uint32_t n_ahead, const ggml_tensor * router_input,
                           ggml_backend_t backend, std::vector<layer_routing> & predictions) = 0;

    // Ranks all experts of the running layer itself, best first, [token][expert]; none where it cannot. From the first
    // call on, begin() computes what this needs too. REQUIRES: accepts(router_input); between end() and predict()
    virtual status rank(const layer_routing & /* running */, const ggml_tensor * /* router_input */,
                        ggml_backend_t /* backend */, std::vector<int32_t> & ranking) {
        ranking.clear();
        return {};
    }
};

// Indices of the k largest, best first: the first of equal ones first and NaN last. REQUIRES: k <= keys.size()
std::vector<int32_t> top_k(std::vector<float> keys, size_t k);

// Makes each token's weights sum to 1; they are equal where they are not known.
void normalize(layer_routing & routing);

struct predictor_traits {
    const char * help = ""; // for the setting hobbit.predictor, behind the name
};

using registered_predictor = registered<predictor, predictor_options, predictor_traits>;

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
