// SPDX-License-Identifier: MIT
#include "execute/moe-executor.h"

#include "execute/hits-ahead.h"
#include "ggml-impl.h"

#include <algorithm>

namespace hobbit {

void count_selections(const step_counts & counts, stats & stats) {
    stats.selections_skipped += counts.skipped;
    for (const tier_id tier : TIERS) {
        stats.selections[tier] += counts.selections[tier];
    }
}

static std::vector<row_source *> without_null(std::vector<row_source *> sources) {
    sources.erase(std::remove(sources.begin(), sources.end(), nullptr), sources.end());
    return sources;
}

moe_executor::moe_executor(const expert_index & index, expert_cache & cache, std::vector<row_source *> sources,
                           run_state & run, stats & stats) :
    index_(index),
    cache_(cache),
    run_(run),
    stats_(stats),
    sources_(without_null(std::move(sources))),
    stream_(index, cache, sources_, stats) {}

bool moe_executor::any_source(bool (row_source::*is_so)() const) const {
    return std::any_of(sources_.begin(), sources_.end(), [&](const row_source * each) { return (each->*is_so)(); });
}

status moe_executor::compute(ggml_cgraph * graph, inner_graph & inner, inner_graph * cpu) {
    if (!error_.ok()) {
        return error_;
    }
    timeline_span span(stats_.events, "layer");
    inner.record(stats_);
    const status s    = run(graph, { inner, cpu });
    layer_.section    = {};
    layer_.in_section = false;
    layer_.ahead      = nullptr; // it computed a section of this graph
    span.note("layer", layer_.routing.layer);
    if (!s.ok()) {
        layer_.ids = nullptr; // the layer is incomplete
        inner.reset();
        inner.measure(false);
        each_source(&row_source::abandon);
        if (cpu) {
            cpu->reset();
        }
        for (const auto & each : hooks_) {
            each->abandon();
        }
    }
    stream_.release(inner);
    running_ = inner.idle() ? nullptr : &inner;
    error_   = s.is_aborted() ? cache_.error() : s; // a read that hangs is not over
    return s;
}

void moe_executor::wait() {
    if (running_) {
        running_->reset();
        stream_.release(*running_);
        running_ = nullptr;
    }
}

// Returns true if a layer begins with the graph: it reads its routing, and so waits for all that is running.
bool moe_executor::begins_layer(ggml_cgraph * graph) const {
    ggml_tensor ** nodes = ggml_graph_nodes(graph);
    ggml_tensor ** end   = nodes + ggml_graph_n_nodes(graph);
    ggml_tensor ** first = std::find_if_not(nodes, end, is_noop);
    return first != end && (*first)->op == GGML_OP_MUL_MAT_ID && (!layer_.ids || layer_.is_ended);
}

// A source repeats the operations between the products.
bool moe_executor::is_done_elsewhere() const {
    return layer_.ahead || (layer_.in_section && any_source(&row_source::has_all));
}

status moe_executor::run(ggml_cgraph * graph, const inner_graphs & on) {
    inner_graph &       inner = on.device;
    const ggml_tensor * last  = nullptr;
    HOBBIT_TRY(begins_layer(graph) ? status() : inner.compute());
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (is_noop(node)) {
            continue;
        }
        if (node->op != GGML_OP_MUL_MAT_ID) {
            last = node;
            if (is_done_elsewhere()) {
                continue;
            }
            HOBBIT_TRY(inner.full() ? inner.compute() : status());
            inner.add_copy(node);
            continue;
        }
        int         end = 0;
        const stage st  = next_stage(graph, i, end);
        HOBBIT_TRY(begin_layer(graph, i, st, last, on));
        if (!layer_.in_section && any_source(&row_source::shares_sections)) {
            HOBBIT_TRY(begin_section(graph, i, on));
        }
        judge_ahead(inner);
        HOBBIT_TRY(stream_.run(st, layer_, on));
        last = st.matmuls.back();
        i    = end - 1;
    }
    return end_layer(last, on);
}

//
// plan: which experts, in which precision
//

routed_layer moe_executor::routed(ggml_cgraph * graph, int first, const inner_graphs & on) const {
    return { layer_.routing, run_.batch, graph, first, layer_.router_input, on.device, on.cpu };
}

// Waits for all that the device runs, and reads in the same wait what the layer is planned by.
status moe_executor::read_layer(inner_graph & inner) {
    const timeline_span span(stats_.events, "routing");
    const ggml_tensor * matmul     = ggml_graph_node(layer_.section.graph, layer_.section.first);
    const layer_id      layer      = expert_of(matmul).layer;
    const bool          may_launch = hooks_.empty() && !run_.observer && run_.batch.pass() == batch_pass::only;
    next_layer          next       = { layer_.section, layer, matmul, inner, may_launch };
    each_source(&row_source::before_routing, next);
    const char * bytes = nullptr;
    status       launched;
    const auto   launch = [&] {
        layer_.ahead = next.ahead;
        launched     = next.ahead->launch(inner);
    };
    HOBBIT_TRY(read_routing(matmul, layer, layer_.routing, inner, next.wants_input ? &layer_.matmul_input : nullptr,
                            next.also, &bytes, next.ahead ? std::function<void()>(launch) : nullptr));
    each_source(&row_source::after_routing, next, bytes);
    if (layer_.ahead) {
        stream_.replace_running(layer_.ahead->take_pins(layer_.routing));
        return launched;
    }
    stream_.release(inner);
    if (inner.idle()) {
        inner.begin_layer(layer);
    }
    return {};
}

// The layer that ran ahead is kept, unless it must be computed once more: to measure it, or without skipped experts.
void moe_executor::judge_ahead(inner_graph & inner) {
    if (layer_.ahead && (!layer_.plan.skipped.empty() || any_source(&row_source::is_measured))) {
        layer_.ahead->undo(inner);
        layer_.ahead = nullptr;
    }
}

status moe_executor::begin_layer(ggml_cgraph * graph, int first, const stage & st, const ggml_tensor * last,
                                 const inner_graphs & on) {
    const ggml_tensor * matmul = st.matmuls.front();
    if (layer_.ids == matmul->src[2] && layer_.routing.layer == expert_of(matmul).layer && !(layer_.done & st.parts)) {
        layer_.done |= st.parts;
        return {};
    }
    if (layer_.ids && !layer_.is_ended) { // the graph has another layer
        const status ended = end_layer(last, on);
        stream_.release(on.device); // a layer may end in another graph
        HOBBIT_TRY(ended);
    }
    layer_         = {};
    layer_.section = section_at(graph, first);
    HOBBIT_TRY(read_layer(on.device));
    layer_.rows = run_.batch.rows(layer_.routing.n_tokens);
    HOBBIT_TRY(check_weights(matmul));
    layer_.ids          = matmul->src[2];
    layer_.router_input = matmul->src[4];
    layer_.done         = st.parts;
    stats_.layers_computed++;
    stats_.waves++;
    for (const auto & each : hooks_) {
        HOBBIT_TRY(each->on_routing(routed(graph, first, on)));
    }
    plan();
    each_source(&row_source::begin_layer, layer_, on.device);
    return stream_.reserve(layer_, on.device);
}

// Sources decide for a section at a time what they compute.
status moe_executor::begin_section(ggml_cgraph * graph, int first, const inner_graphs & on) {
    layer_.in_section = true;
    layer_.section    = layer_.section.graph ? layer_.section : section_at(graph, first);
    HOBBIT_TRY(layer_.ahead ? status() : on.device.compute()); // it has computed the section's input
    each_source(&row_source::begin_section, layer_.section, layer_.matmul_input, on.device);
    for (const auto & each : hooks_) {
        HOBBIT_TRY(each->before_rest(routed(graph, first, on)));
    }
    return {};
}

// Without the router's weights every expert is equally important.
status moe_executor::check_weights(const ggml_tensor * matmul) const {
    const auto all_high = [&](const batch_info::row & row) { return run_.thresholds.of(row.sequence).all_high(); };
    if (layer_.routing.weights.empty() && !std::all_of(layer_.rows.begin(), layer_.rows.end(), all_high)) {
        return status::error("the router weights of '%s' are not known: run this model with t1 = 1",
                             matmul->src[0]->name);
    }
    return {};
}

// Keeps what a report says of the time before the layer runs: later the router's input is overwritten.
void moe_executor::observe() {
    const layer_routing & routing = layer_.routing;
    const part_set        parts   = index_.layer(routing.layer).parts;
    for (const int32_t expert : routing.experts) {
        const expert_id id = { routing.layer, uint32_t(expert) };
        layer_.was_resident.emplace_back();
        for (const tier_id tier : TIERS) {
            layer_.was_resident.back()[tier] = cache_.holds(id, tier, parts);
        }
    }
    const ggml_tensor * input = layer_.router_input;
    if (input && input->type == GGML_TYPE_F32 && ggml_is_contiguous(input) && ggml_nrows(input) == routing.n_tokens) {
        layer_.input.resize(ggml_nelements(input));
        ggml_backend_tensor_get(input, layer_.input.data(), 0, ggml_nbytes(input));
    }
}

void moe_executor::plan() {
    const timeline_span   span(stats_.events, "plan");
    const layer_routing & routing = layer_.routing;
    const part_set        parts   = index_.layer(routing.layer).parts;
    const residency       holds   = [&](expert_id id, tier_id tier) { return cache_.holds(id, tier, parts); };

    each_source(&row_source::on_routing, routing);
    if (run_.observer && !is_second()) {
        observe();
    }
    std::vector<uint32_t> sequences; // [token]
    for (const batch_info::row & row : layer_.rows) {
        sequences.push_back(uint32_t(row.sequence));
    }
    const auto  thresholds = run_.thresholds.of(layer_.rows);
    const bool  has_low    = cache_.n_slots(tier_id::low) > 0;
    step_counts counts;
    const auto adjust = [&](const rule_input & in, std::vector<precision> & precisions, std::vector<int32_t> & served) {
        for (const auto & each : hooks_) {
            each->adjust(in, precisions, served);
        }
    };
    const auto is_new = [&](int32_t i, precision served) { return run_.passes->is_new(routing, i, served); };
    layer_.plan = run_.step.run({ routing, thresholds, holds, has_low, index_.serving() }, sequences, counts, nullptr,
                                is_second() ? layer_step::novelty(is_new) : nullptr, adjust);
    count(counts);
    // Hits come first, and then misses that the next-level cache holds: making room for others must not evict them.
    const auto is_near = [&](const planned_use & use) { return cache_.holds_below(use.id, use.tier, parts); };
    const auto is_hit  = [&](const planned_use & use) { return holds(use.id, use.tier); };
    for (const planned_use & use : layer_.plan.uses) {
        const auto is_first = [&](int32_t i) { return !is_second() || is_new(i, layer_.plan.precisions[size_t(i)]); };
        stats_.host_hits[use.tier] +=
            !is_hit(use) && is_near(use) && std::any_of(use.selections.begin(), use.selections.end(), is_first);
    }
    std::stable_partition(layer_.plan.uses.begin(), layer_.plan.uses.end(), is_near);
    std::stable_partition(layer_.plan.uses.begin(), layer_.plan.uses.end(), is_hit);
}

void moe_executor::count(const step_counts & counts) {
    const size_t layer = layer_.routing.layer;
    for (const tier_id tier : TIERS) {
        const uint64_t hits  = counts.uses[tier] - counts.misses[tier];
        stats_.hits[tier]   += hits;
        stats_.misses[tier] += counts.misses[tier];
        if (layer < stats_.layers.size()) {
            stats_.layers[layer].hits   += hits;
            stats_.layers[layer].misses += counts.misses[tier];
        }
    }
    if (run_.batch.pass() == batch_pass::draft) {
        run_.passes->keep(layer_.routing, layer_.plan, counts);
    } else {
        count_selections(counts, stats_);
    }
}

// `output` is the last tensor that the graph computed: the experts' outputs once the last part is computed.
status moe_executor::end_layer(const ggml_tensor * output, const inner_graphs & on) {
    const bool is_complete = layer_.ids && output && (layer_.done & part_id::down);
    if (is_complete) {
        HOBBIT_TRY(clear_skipped(output, layer_, on.device)); // a bias was added to these rows
    }
    const bool is_observed = run_.observer && !is_second();
    HOBBIT_TRY(stream_.finish(on, is_observed));
    if (!is_complete || layer_.is_ended) {
        return {};
    }
    layer_.is_ended = true;
    stream_.release(on.device);
    if (is_observed) {
        run_.observer({ layer_.routing, layer_.plan, layer_.rows, layer_.was_resident, layer_.input, output });
    }
    each_source(&row_source::end_layer, on.device);
    return {};
}

} // namespace hobbit
