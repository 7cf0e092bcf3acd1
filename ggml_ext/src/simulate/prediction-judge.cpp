// SPDX-License-Identifier: MIT
#include "simulate/prediction-judge.h"

#include <algorithm>
#include <string>
#include <vector>

namespace hobbit {

static bool runs_on_routes(const predictor & p) {
    return p.accepts(nullptr);
}

status prediction_judge::open(const hobbit_simulation & options) {
    recall_ = options.recall_by_layer;
    if (!options.predictor) {
        return {};
    }
    predictor_options of;
    of.n_experts.assign(options.n_layers, options.n_experts);
    if (options.n_used_by_layer) {
        of.n_used.assign(options.n_used_by_layer, options.n_used_by_layer + options.n_layers);
    }
    std::string all;
    for (const std::string & name : predictor_names()) {
        of.name        = name;
        auto candidate = make_predictor(of);
        if (runs_on_routes(*candidate)) {
            all     += (all.empty() ? "" : ", ") + name;
            judged_  = name == options.predictor ? std::move(candidate) : std::move(judged_);
        }
    }
    return judged_ ? status()
                   : status::error("no predictor '%s' runs on routes alone, which is all that a trace holds: choose "
                                   "one of %s",
                                   options.predictor, all.c_str());
}

void prediction_judge::on_routing(const layer_routing & routing, bool is_counted, hobbit_simulation_result & result) {
    if (!judged_) {
        return;
    }
    judged_->on_routing(routing);
    if (routing.layer != layer_) { // the layer did not run
        predicted_.clear();
        missing_.clear();
    }
    if (is_counted && routing.layer > 0) { // nothing is predicted for the first layer
        const std::set<uint32_t> chosen(routing.experts.begin(), routing.experts.end());
        const auto               is_chosen = [&](uint32_t e) { return chosen.count(e) > 0; };
        const auto               n_chosen  = [&](const std::set<uint32_t> & experts) {
            return uint64_t(std::count_if(experts.begin(), experts.end(), is_chosen));
        };
        const uint64_t n_right          = n_chosen(predicted_);
        result.predictable             += chosen.size();
        result.predicted_right         += n_right;
        result.predicted_missing       += missing_.size();
        result.predicted_missing_right += n_chosen(missing_);
        if (recall_) {
            recall_[routing.layer].predictable     += chosen.size();
            recall_[routing.layer].predicted_right += n_right;
        }
    }
}

void prediction_judge::look_ahead(const layer_routing & running, const std::function<bool(expert_id)> & is_resident) {
    if (!judged_) {
        return;
    }
    std::vector<layer_routing> predictions;
    const status               s = judged_->predict(running, 1, nullptr, nullptr, predictions);
    GGML_ASSERT(s.ok()); // it only reads its own tables
    layer_ = layer_id(running.layer + 1);
    predicted_.clear();
    missing_.clear();
    for (const layer_routing & next : predictions) {
        for (const int32_t expert : next.experts) {
            predicted_.insert(uint32_t(expert));
            if (!is_resident({ next.layer, uint32_t(expert) })) {
                missing_.insert(uint32_t(expert));
            }
        }
    }
}

} // namespace hobbit
