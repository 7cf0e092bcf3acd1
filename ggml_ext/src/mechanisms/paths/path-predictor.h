// SPDX-License-Identifier: MIT
#pragma once

#include "model/calibration.h"
#include "model/expert.h"
#include "predict/predictor.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace hobbit {

// How often each expert of a layer was chosen in some situation. Old choices count less: all counts are halved when
// they are of max_tokens.
class choice_counts {
  public:
    static constexpr uint8_t max_tokens = 32; // larger ones only lower the recall

    choice_counts() = default;

    explicit choice_counts(size_t n_experts) : uses_(n_experts) {}

    bool empty() const { return n_tokens_ == 0; }

    // One token's choice.
    void add(const int32_t * experts, size_t n);

    // Takes these counts in place of its own: n_tokens at least 1, and for some experts how many chose them.
    void set(const stored_path & path);

    // The share of tokens that chose the expert, as if n_prior further tokens had chosen it with this probability.
    float share(size_t expert, float prior, float n_prior) const {
        return (float(uses_[expert]) + n_prior * prior) / (float(n_tokens_) + n_prior);
    }

  private:
    std::vector<uint8_t> uses_; // [expert]
    uint8_t              n_tokens_ = 0;
};

// EdgeMoE's activation paths (arXiv 2308.14352, section III-C1): what a calibration has learnt, and what the model
// chooses while it runs. The next layer's experts follow from those chosen in this one:
//
//     P(e) = sum over the chosen experts i of w_i n(i, e) / n(i)
//
// w_i is the gate weight, n(i, e) the number of tokens that chose i and then e, and n(i) that of tokens that chose i.
// Where n(i) is small, the frequency of e in its layer stands in. The layers after the next follow from the predicted
// ones. It needs routes alone, so that the simulator can run it.
//
// The paper's dictionary is keyed by everything chosen in the two last layers. Where there is one it comes first, and
// pairs stand in where its counts are small. With many experts a key rarely comes again, so that the dictionary takes
// no further keys when it has reached its size.
//
// Experts below options.bar are not named, in a batch those that are for all of its tokens; the layers behind one
// without any are not predicted.
class path_predictor final : public predictor {
  public:
    // dictionary_size: bytes of the dictionary; 0: none.
    path_predictor(const predictor_options & options, size_t dictionary_size);

    size_t bytes() const override;

    void on_routing(const layer_routing & routing) override;

    status predict(const layer_routing & running, uint32_t n_ahead, const ggml_tensor * router_input,
                   ggml_backend_t backend, std::vector<layer_routing> & predictions) override;

  private:
    // A token's choices in a layer and in the one before it; no experts if that did not run.
    struct path {
        const int32_t * experts;
        const float *   weights; // their sum is 1
        size_t          n;
        const int32_t * before;
        size_t          n_before;
    };

    static path        path_of(const layer_routing & now, const layer_routing & before, int64_t token);
    static std::string key(layer_id layer, const path & p);

    choice_counts *    entry(layer_id layer, const path & p); // counts in the dictionary; null: it has no room
    void               recall(const stored_path & stored);
    size_t             n_named(const std::vector<std::vector<float>> & p, size_t most) const;
    std::vector<float> probabilities(layer_id layer, const path & p) const;

    const std::vector<uint32_t> n_experts_; // [layer]
    const std::vector<uint32_t> n_used_;    // [layer]; empty: as the running one
    const size_t                dictionary_size_;
    const float                 bar_;
    std::vector<choice_counts>  any_;    // [layer] whatever was chosen before
    expert_table<choice_counts> after_;  // [expert] what the next layer chose
    layer_routing               now_;    // routing of the layer that ran last; the weights' sum is 1
    layer_routing               before_; // routing of the layer before it, with the same tokens; else no tokens

    std::unordered_map<std::string, choice_counts> dictionary_;
    size_t                                         n_taken_ = 0; // bytes of dictionary_size_
};

} // namespace hobbit
