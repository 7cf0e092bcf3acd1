// SPDX-License-Identifier: MIT
#include "mechanisms/replacement/replacement-hooks.h"

#include "doors/layer-hooks.h"
#include "ggml-impl.h"
#include "graph/routing.h"
#include "predict/predictor.h"

#include <algorithm>
#include <set>

namespace hobbit {

std::vector<int32_t> replace_missing(const rule_input & in, const std::vector<int32_t> & ranking,
                                     std::vector<precision> & precisions) {
    const layer_routing & routing   = in.routing;
    const size_t          n_used    = size_t(routing.n_used);
    const size_t          n_experts = ranking.size() / size_t(routing.n_tokens);
    std::vector<int32_t>  served    = routing.experts;
    const auto            is_held   = [&](int32_t expert, tier_id tier) {
        return (tier == tier_id::high || in.has_low) && in.is_resident({ routing.layer, uint32_t(expert) }, tier);
    };

    std::vector<size_t> others; // missing selections but the best of each token
    std::set<int32_t>   fetched;
    for (size_t first = 0; first < served.size(); first += n_used) {
        bool is_best = true;
        for (size_t i = first; i < first + n_used; i++) {
            if (precisions[i] == precision::skip || is_held(served[i], tier_of(precisions[i]))) {
                continue;
            }
            if (is_best) {
                fetched.insert(served[i]);
            } else {
                others.push_back(i);
            }
            is_best = false;
        }
    }
    for (const size_t i : others) {
        const auto own    = served.begin() + ptrdiff_t(i / n_used * n_used);
        const auto best   = ranking.begin() + ptrdiff_t(i / n_used * n_experts);
        const auto end    = best + ptrdiff_t(n_experts);
        const auto serves = [&](int32_t expert) {
            return (is_held(expert, tier_id::high) || is_held(expert, tier_id::low)) &&
                   std::find(own, own + ptrdiff_t(n_used), expert) == own + ptrdiff_t(n_used);
        };
        const auto found = fetched.count(served[i]) > 0 ? end : std::find_if(best, end, serves);
        if (found != end) {
            served[i]     = *found;
            precisions[i] = is_held(*found, tier_id::high) ? precision::high : precision::low;
        }
    }
    return served;
}

// Returns true if only the matmuls depend on the expert that serves a row, and no bias or scale does.
static bool can_replace(ggml_cgraph * graph, int first, part_set all) {
    const ggml_tensor * ids     = ggml_graph_node(graph, first)->src[2];
    const layer_section section = section_at(graph, first);
    for (int i = first; i < section.end; i++) {
        const ggml_tensor * node  = ggml_graph_node(graph, i);
        const auto          reads = [&](const ggml_tensor * source) { return source && source == ids; };
        if (node->op != GGML_OP_MUL_MAT_ID && std::any_of(node->src, node->src + GGML_MAX_SRC, reads)) {
            return false;
        }
    }
    return section.parts == all;
}

namespace {

// Replaces missing experts of generated tokens. They are ranked by the router's copy in the predictor, since a GPU's
// own router writes the chosen ones alone; its half precision may change the order of neighbours.
class replacement_hooks final : public layer_hooks {
  public:
    explicit replacement_hooks(const hook_parts & parts) : parts_(parts) {}

    status on_routing(const routed_layer & layer) override {
        const layer_routing & routing = layer.routing;
        ranking_.clear();
        if (layer.batch.pass() == batch_pass::second || routing.n_tokens > batch_info::max_generated ||
            n_missing(routing) < 2) { // the best of a token is fetched
            return {};
        }
        const ggml_tensor * input = layer.router_input;
        if (parts_.ahead && input && parts_.ahead->accepts(input) &&
            can_replace(layer.graph, layer.first, parts_.index.layer(routing.layer).parts)) {
            HOBBIT_TRY(parts_.ahead->rank(routing, input, layer.device.backend(), ranking_));
        }
        if (ranking_.empty() && !is_declined_) {
            GGML_LOG_WARN("hobbit: no missing expert is replaced (hobbit.degrade): that takes prefetch with the "
                          "predictor 'router', and experts without biases or scales of their own\n");
            is_declined_ = true;
        }
        return {};
    }

    void adjust(const rule_input & in, std::vector<precision> & precisions, std::vector<int32_t> & served) override {
        if (ranking_.empty()) {
            return;
        }
        served = replace_missing(in, ranking_, precisions);
        for (size_t i = 0; i < served.size(); i++) {
            parts_.counters.of("selections_replaced") += served[i] != in.routing.experts[i];
        }
    }

  private:
    ptrdiff_t n_missing(const layer_routing & routing) const {
        const part_set parts = parts_.index.layer(routing.layer).parts;
        return std::count_if(routing.experts.begin(), routing.experts.end(), [&](int32_t e) {
            return !parts_.cache.holds({ routing.layer, uint32_t(e) }, tier_id::high, parts);
        });
    }

    const hook_parts     parts_;
    std::vector<int32_t> ranking_;             // ranking of the layer that begins; empty: nothing is replaced
    bool                 is_declined_ = false; // a warning has said that it cannot
};

const registered_hooks maker("replacement", [](const hook_parts & parts) -> std::unique_ptr<layer_hooks> {
    return parts.settings.number("hobbit.degrade") != 0 ? std::make_unique<replacement_hooks>(parts) : nullptr;
});

} // namespace

} // namespace hobbit
