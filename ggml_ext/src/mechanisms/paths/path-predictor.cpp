// SPDX-License-Identifier: MIT
#include "base/setting-table.h"
#include "model/calibration.h"
#include "predict/predictor.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace hobbit {

namespace {

constexpr float  N_PRIOR        = 0.5f; // tokens; from 0.25 to 1 the recall on real traces changes little
constexpr size_t ENTRY_OVERHEAD = 128;  // bytes of an entry of the dictionary beside its key and counts

// How often each expert of a layer was chosen in some situation. Old choices count less: all counts are halved when
// they are of max_tokens.
class choice_counts {
  public:
    static constexpr uint8_t max_tokens = 32; // larger ones only lower the recall

    choice_counts() = default;

    explicit choice_counts(size_t n_experts) : uses_(n_experts) {}

    bool empty() const { return n_tokens_ == 0; }

    // One token's choice.
    void add(const int32_t * experts, size_t n) {
        if (n_tokens_ == max_tokens) {
            n_tokens_ /= 2;
            std::transform(uses_.begin(), uses_.end(), uses_.begin(), [](uint8_t count) { return uint8_t(count / 2); });
        }
        n_tokens_++;
        for (size_t i = 0; i < n; i++) {
            uses_[size_t(experts[i])]++; // not above n_tokens_, since a token's experts are distinct
        }
    }

    // Takes these counts in place of its own: n_tokens at least 1, and for some experts how many chose them.
    void set(const stored_path & path) {
        const int most = std::min<int>(path.n_tokens, max_tokens);
        n_tokens_      = uint8_t(most);
        for (size_t i = 0; i < path.n_next; i++) {
            const int count                  = path.next[i] & 255;
            uses_[size_t(path.next[i]) >> 8] = uint8_t((count * most + path.n_tokens / 2) / path.n_tokens);
        }
    }

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
    path_predictor(const predictor_options & options, size_t dictionary_size) :
        n_experts_(options.n_experts),
        n_used_(options.n_used),
        dictionary_size_(dictionary_size),
        bar_(float(options.bar)),
        after_(n_experts_.size(), *std::max_element(n_experts_.begin(), n_experts_.end())) {
        for (layer_id layer; layer < n_experts_.size(); layer++) {
            any_.emplace_back(n_experts_[layer]);
            for (uint32_t e = 0; layer + 1 < n_experts_.size() && e < n_experts_[layer]; e++) {
                after_[{ layer, e }] = choice_counts(n_experts_[layer + 1]);
            }
        }
        const bool is_known = each_path(options.paths, n_experts_, [&](const stored_path & each) { recall(each); });
        GGML_ASSERT(is_known); // whoever reads them has checked
    }

    size_t bytes() const override {
        size_t bytes = dictionary_size_;
        for (size_t layer = 0; layer + 1 < n_experts_.size(); layer++) {
            bytes += n_experts_[layer] * (n_experts_[layer + 1] + sizeof(choice_counts));
        }
        return bytes;
    }

    void on_routing(const layer_routing & routing) override {
        const bool   follows = routing.layer == now_.layer + 1 && routing.n_tokens == now_.n_tokens;
        const size_t n_used  = size_t(routing.n_used);
        for (int64_t token = 0; token < routing.n_tokens; token++) {
            const int32_t * chosen = &routing.experts[size_t(token) * n_used];
            any_[routing.layer].add(chosen, n_used);
            if (!follows) {
                continue;
            }
            const path p = path_of(now_, before_, token);
            for (size_t i = 0; i < p.n; i++) {
                after_[{ now_.layer, uint32_t(p.experts[i]) }].add(chosen, n_used);
            }
            if (dictionary_size_ > 0 && p.n_before > 0) {
                if (choice_counts * const counts = entry(now_.layer, p)) {
                    counts->add(chosen, n_used);
                }
            }
        }
        before_ = follows ? std::move(now_) : layer_routing();
        now_    = routing;
        normalize(now_);
    }

    status predict(const layer_routing & running, uint32_t n_ahead, const ggml_tensor *, ggml_backend_t,
                   std::vector<layer_routing> & predictions) override {
        GGML_ASSERT(running.layer == now_.layer && running.n_tokens == now_.n_tokens);
        predictions.clear();
        predictions.reserve(n_ahead); // `now` and `before` point into it
        const layer_routing * now    = &now_;
        const layer_routing * before = &before_;
        for (layer_id l(running.layer + 1); l < any_.size() && predictions.size() < n_ahead && !any_[l].empty(); l++) {
            const int64_t                   n_used = n_used_.empty() ? running.n_used : n_used_[l];
            std::vector<std::vector<float>> p; // [token]
            for (int64_t token = 0; token < now->n_tokens; token++) {
                p.push_back(probabilities(now->layer, path_of(*now, *before, token)));
            }
            const size_t  n_next = n_named(p, size_t(std::min<int64_t>(n_used, n_experts_[l])));
            layer_routing next   = { l, now->n_tokens, int64_t(n_next), {}, {} };
            if (n_next == 0) {
                break;
            }
            for (const std::vector<float> & of : p) {
                for (const int32_t e : top_k(of, n_next)) {
                    next.experts.push_back(e);
                    next.weights.push_back(of[size_t(e)]);
                }
            }
            normalize(next);
            predictions.push_back(std::move(next));
            before = now;
            now    = &predictions.back();
        }
        return {};
    }

  private:
    // A token's choices in a layer and in the one before it; no experts if that did not run.
    struct path {
        const int32_t * experts;
        const float *   weights; // their sum is 1
        size_t          n;
        const int32_t * before;
        size_t          n_before;
    };

    static path path_of(const layer_routing & now, const layer_routing & before, int64_t token) {
        const bool   follows  = before.n_tokens == now.n_tokens;
        const size_t n        = size_t(now.n_used);
        const size_t n_before = follows ? size_t(before.n_used) : 0;
        const size_t first    = size_t(token) * n;
        return { &now.experts[first], &now.weights[first], n,
                 follows ? &before.experts[size_t(token) * n_before] : nullptr, n_before };
    }

    // The dictionary's key of a path: everything chosen, in the order of experts. `layer` chose last.
    static std::string key(layer_id layer, const path & p) {
        std::vector<uint32_t> words(p.experts, p.experts + p.n);
        words.insert(words.end(), p.before, p.before + p.n_before);
        std::sort(words.begin(), words.begin() + ptrdiff_t(p.n));
        std::sort(words.begin() + ptrdiff_t(p.n), words.end());
        words.push_back(layer);
        return { reinterpret_cast<const char *>(words.data()), words.size() * sizeof(words[0]) };
    }

    // Counts in the dictionary; null: it has no room.
    choice_counts * entry(layer_id layer, const path & p) {
        const std::string name      = key(layer, p);
        const size_t      n_experts = n_experts_[layer + 1];
        const size_t      size      = name.size() + n_experts + ENTRY_OVERHEAD;
        const auto        it        = dictionary_.find(name);
        if (it != dictionary_.end()) {
            return &it->second;
        }
        if (n_taken_ + size > dictionary_size_) {
            return nullptr;
        }
        n_taken_ += size;
        return &dictionary_.emplace(name, n_experts).first->second;
    }

    void recall(const stored_path & stored) {
        if (stored.n_now == 0) {
            any_[stored.layer].set(stored);
        } else if (stored.n_before == 0) {
            after_[{ layer_id(stored.layer - 1), uint32_t(stored.now[0]) }].set(stored);
        } else if (choice_counts * const counts =
                       entry(layer_id(stored.layer - 1),
                             { stored.now, nullptr, stored.n_now, stored.before, stored.n_before })) {
            counts->set(stored);
        }
    }

    // Probabilities for the experts of the layer after `layer`, the last one that chose.
    std::vector<float> probabilities(layer_id layer, const path & p) const {
        std::vector<float> of(n_experts_[layer + 1]);
        for (size_t e = 0; e < of.size(); e++) {
            const float frequency = any_[layer + 1].share(e, 0.0f, 0.0f);
            for (size_t i = 0; i < p.n; i++) {
                of[e] += p.weights[i] * after_[{ layer, uint32_t(p.experts[i]) }].share(e, frequency, N_PRIOR);
            }
        }
        if (dictionary_size_ > 0 && p.n_before > 0) {
            const auto it = dictionary_.find(key(layer, p));
            for (size_t e = 0; it != dictionary_.end() && e < of.size(); e++) {
                of[e] = it->second.share(e, of[e], N_PRIOR);
            }
        }
        return of;
    }

    // Columns of the `most` likeliest experts of each token in which some token's is above the bar.
    size_t n_named(const std::vector<std::vector<float>> & p, size_t most) const {
        size_t n = 0;
        for (const std::vector<float> & of : p) {
            n = std::max(n, size_t(std::count_if(of.begin(), of.end(), [&](float each) { return each >= bar_; })));
        }
        return std::min(n, most);
    }

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

template <size_t dictionary_size>
std::unique_ptr<predictor> make(const predictor_options & options) {
    return std::make_unique<path_predictor>(options, dictionary_size);
}

const bool is_edgemoe = register_paper({ "edgemoe", "a low tier and pyhobbit calibrate --set rule=edgemoe",
                                         "rule=edgemoe policy=edgemoe predictor=paths-exact prefetch=1" });

const registered_predictor makers[] = {
    { "paths", make<0>, { "learns which experts follow which" } },
    { "paths-exact", make<8u << 20>, { "by two layers" } },
};

} // namespace

} // namespace hobbit
