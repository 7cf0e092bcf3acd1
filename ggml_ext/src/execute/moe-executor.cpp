// SPDX-License-Identifier: MIT
#include "execute/moe-executor.h"

#include "graph/routing.h"

#include <algorithm>

namespace hobbit {

moe_executor::moe_executor(const expert_index & index, expert_cache & cache, prefetcher * prefetcher, cpu_share * share,
                           run_state & run, stats & stats) :
    index_(index),
    cache_(cache),
    prefetcher_(prefetcher),
    share_(share),
    run_(run),
    stats_(stats),
    products_(index, cache) {}

status moe_executor::compute(ggml_cgraph * graph, inner_graph & inner, inner_graph * cpu) {
    if (!error_.ok()) {
        return error_;
    }
    GGML_ASSERT(cpu || !share_);
    cpu_              = cpu;
    const status s    = run(graph, inner);
    layer_.in_section = false;
    release_held();
    if (!s.ok()) {
        layer_.ids = nullptr; // the layer is not done
        inner.reset();
        inner.measure(false);
        if (share_) {
            share_->abandon();
            cpu->reset();
        }
    }
    if (!s.is_aborted()) {
        error_ = s;
    }
    return s;
}

status moe_executor::run(ggml_cgraph * graph, inner_graph & inner) {
    const ggml_tensor * last = nullptr;
    status              s;
    for (int i = 0; i < ggml_graph_n_nodes(graph) && s.ok(); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (is_noop(node)) {
            continue;
        }
        if (node->op != GGML_OP_MUL_MAT_ID) {
            if (inner.full()) {
                s = inner.compute();
            }
            inner.add_copy(node);
            last = node;
            continue;
        }
        int         end = 0;
        const stage st  = next_stage(graph, i, end);
        s               = begin_layer(st, last, inner);
        if (s.ok() && share_ && !layer_.in_section) {
            s = begin_section(graph, i, inner);
        }
        if (s.ok()) {
            s = run_stage(st, inner);
        }
        last = st.matmuls.back();
        i    = end - 1;
    }
    return s.ok() ? end_layer(last, inner) : s;
}

// Addresses tell apart what is in one buffer only: with Vulkan each begins at the same one.
static bool depends_on(const ggml_tensor * tensor, const ggml_tensor * other) {
    const auto buffer_of = [](const ggml_tensor * t) { return t->view_src ? t->view_src->buffer : t->buffer; };
    return tensor->view_src == other || (tensor->data == other->data && buffer_of(tensor) == buffer_of(other));
}

// Gate and up share their input; a matmul that reads the output of another starts a new stage.
moe_executor::stage moe_executor::next_stage(ggml_cgraph * graph, int first, int & end) {
    stage s;
    for (end = first; end < ggml_graph_n_nodes(graph); end++) {
        const ggml_tensor * node = ggml_graph_node(graph, end);
        if (is_noop(node)) {
            continue;
        }
        const bool joins = node->op == GGML_OP_MUL_MAT_ID && !(s.parts & expert_of(node).part) &&
                           std::none_of(s.matmuls.begin(), s.matmuls.end(), [&](const ggml_tensor * m) {
                               return m->src[2] != node->src[2] || depends_on(node->src[1], m);
                           });
        if (!joins) {
            break;
        }
        s.matmuls.push_back(node);
        s.parts |= expert_of(node).part;
    }
    return s;
}

//
// plan: which experts, in which precision
//

status moe_executor::begin_layer(const stage & st, const ggml_tensor * last, inner_graph & inner) {
    const ggml_tensor * matmul = st.matmuls.front();
    if (layer_.ids == matmul->src[2] && layer_.routing.layer == expert_of(matmul).layer && !(layer_.done & st.parts)) {
        layer_.done |= st.parts;
        return {};
    }
    if (layer_.ids && !layer_.is_ended) { // another layer in the same graph
        const status s = end_layer(last, inner);
        release_held(); // of a layer that another graph ends
        if (!s.ok()) {
            return s;
        }
    }
    layer_   = {};
    status s = read_routing(matmul, expert_of(matmul).layer, layer_.routing);
    if (s.ok()) {
        layer_.rows = run_.batch.rows(layer_.routing.n_tokens);
        s           = check_weights(matmul);
    }
    if (!s.ok()) {
        return s;
    }
    layer_.ids          = matmul->src[2];
    layer_.router_input = matmul->src[4];
    layer_.done         = st.parts;
    stats_.layers_computed++;
    stats_.waves++;
    plan();
    if (share_) {
        share_->begin_layer(layer_.routing, layer_.plan, inner);
    }
    return products_.reserve(layer_.routing, inner);
}

// From a matmul to the end of the graph, or to another layer.
status moe_executor::begin_section(ggml_cgraph * graph, int first, inner_graph & inner) {
    part_set parts;
    int      end = first;
    for (; end < ggml_graph_n_nodes(graph); end++) {
        const ggml_tensor * node      = ggml_graph_node(graph, end);
        const bool          is_matmul = node->op == GGML_OP_MUL_MAT_ID && !is_noop(node);
        if (is_matmul && (expert_of(node).layer != layer_.routing.layer || (parts & expert_of(node).part))) {
            break;
        }
        parts |= is_matmul ? part_set(expert_of(node).part) : part_set();
    }
    layer_.in_section = true;
    const status s    = inner.compute();
    if (s.ok()) {
        share_->begin_section({ graph, first, end }, parts);
    }
    return s;
}

status moe_executor::end_section(inner_graph & inner) {
    status s;
    while (s.ok() && is_share_due()) {
        s = compute_share(inner);
    }
    s = s.ok() ? inner.compute() : s;
    return s.ok() && share_ ? share_->end_section(inner) : s;
}

// The CPU computes some of its rows while the device runs what was added: while experts are on their way, and the rest
// at the end.
status moe_executor::compute_share(inner_graph & inner) {
    const status s = inner.launch();
    return s.ok() ? share_->compute_next(*cpu_) : s;
}

bool moe_executor::is_on_cpu(const planned_use & use, const stage & st) const {
    return share_ && share_->computes(use, st.parts);
}

// Without the router's weights no expert is worth less than another.
status moe_executor::check_weights(const ggml_tensor * matmul) const {
    const auto all_high = [&](const batch_info::row & row) { return run_.thresholds.of(row.sequence).all_high(); };
    if (layer_.routing.weights.empty() && !std::all_of(layer_.rows.begin(), layer_.rows.end(), all_high)) {
        return status::error(
            format("the router weights of '%s' are not known: run this model with t1 = 1", matmul->src[0]->name));
    }
    return {};
}

// What a report says of the time before: when the layer has run, the router's input has been overwritten.
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
    const layer_routing & routing = layer_.routing;
    const part_set        parts   = index_.layer(routing.layer).parts;
    const residency       holds   = [&](expert_id id, tier_id tier) { return cache_.holds(id, tier, parts); };

    if (prefetcher_) {
        prefetcher_->on_routing(routing);
    }
    if (run_.observer) {
        observe();
    }
    std::vector<uint32_t> sequences; // [token]
    for (const batch_info::row & row : layer_.rows) {
        sequences.push_back(uint32_t(row.sequence));
    }
    const auto  thresholds = run_.thresholds.of(layer_.rows);
    const bool  has_low    = cache_.n_slots(term_id::low) > 0;
    step_counts counts;
    layer_.plan = run_.step.run({ routing, thresholds, holds, has_low }, sequences, counts);
    count(counts);

    // Hits come first, and then misses that the next-level cache holds: making room for others must not evict them.
    const auto is_near = [&](const planned_use & use) { return cache_.holds_below(use.id, use.tier, parts); };
    const auto is_hit  = [&](const planned_use & use) { return holds(use.id, use.tier); };
    for (const planned_use & use : layer_.plan.uses) {
        stats_.host_hits[use.tier] += !is_hit(use) && is_near(use);
    }
    std::stable_partition(layer_.plan.uses.begin(), layer_.plan.uses.end(), is_near);
    std::stable_partition(layer_.plan.uses.begin(), layer_.plan.uses.end(), is_hit);
}

void moe_executor::count(const step_counts & counts) {
    stats_.selections_skipped += counts.skipped;
    for (const tier_id tier : TIERS) {
        stats_.selections[tier] += counts.selections[tier];
        stats_.hits[tier]       += counts.uses[tier] - counts.misses[tier];
        stats_.misses[tier]     += counts.misses[tier];
    }
}

// `output` is what the graph computed last: the experts' outputs when the last part is done.
status moe_executor::end_layer(const ggml_tensor * output, inner_graph & inner) {
    status s = end_section(inner);
    if (s.ok() && layer_.ids && output && (layer_.done & part_id::down)) {
        s = clear_skipped(output, inner); // what a bias has added to them
        if (!layer_.is_ended) {
            layer_.is_ended = true;
            release_held();
            if (run_.observer) {
                run_.observer({ layer_.routing, layer_.plan, layer_.rows, layer_.was_resident, layer_.input, output });
            }
            if (prefetcher_) {
                prefetcher_->end_layer(layer_.routing.layer);
            }
            if (share_) {
                share_->end_layer(output, inner, *cpu_);
            }
        }
    }
    return s;
}

//
// run
//

// Pins as many experts as the pools hold, computes those that have arrived while the others are on their way, and lets
// them go where others wait for a slot.
status moe_executor::run_stage(const stage & st, inner_graph & inner) {
    for (const ggml_tensor * matmul : st.matmuls) {
        const status s = clear_skipped(matmul, inner);
        if (!s.ok()) {
            return s;
        }
    }

    status s = clear_share(st, inner);
    if (!s.ok()) {
        return s;
    }

    std::vector<const planned_use *> todo; // the pinned ones first
    todo.swap(held_);
    size_t     n_pinned    = todo.size();
    bool       rest_is_due = layer_.done != index_.layer(layer_.routing.layer).parts;
    const auto is_pinned   = [&](const planned_use * use) {
        const auto end = todo.begin() + ptrdiff_t(n_pinned);
        return std::find(todo.begin(), end, use) != end;
    };
    for (const planned_use & use : layer_.plan.uses) {
        if (!is_on_cpu(use, st) && !is_pinned(&use)) {
            todo.push_back(&use);
        }
    }

    for (size_t i = 0; i < n_pinned; i++) {
        cache_.request(todo[i]->id, todo[i]->tier, st.parts);
    }

    if (todo.empty() && rest_is_due) { // the CPU has them all
        s = begin_rest(st, todo, inner);
    }
    while (s.ok() && !todo.empty()) {
        n_pinned += pin(st, todo, n_pinned);
        if (n_pinned == 0) { // nobody else pins anything for long
            return cache_.error().ok() ? status::error("no slot is free: the expert cache is broken") : cache_.error();
        }
        const bool all_pinned = n_pinned == todo.size();
        if (all_pinned && rest_is_due) {
            s           = begin_rest(st, todo, inner);
            rest_is_due = false;
        }
        if (s.ok()) {
            s = run_arrived(st, todo, n_pinned, !all_pinned, inner);
        }
    }
    for (size_t i = 0; i < n_pinned; i++) { // after an error
        cache_.release(todo[i]->id, todo[i]->tier);
    }
    return s;
}

// Pins experts from number n_pinned on, and asks for what the stage needs of them. Returns how many.
size_t moe_executor::pin(const stage & st, const std::vector<const planned_use *> & uses, size_t n_pinned) {
    size_t n = n_pinned;
    for (; n < uses.size() && cache_.acquire(uses[n]->id, uses[n]->tier); n++) {
        cache_.request(uses[n]->id, uses[n]->tier, st.parts);
    }
    return n - n_pinned;
}

// Nothing of the stage is left to ask for: the disk goes on with what later stages need of the experts that keep their
// slots until then, and with layers to come.
status moe_executor::begin_rest(const stage & st, const std::vector<const planned_use *> & pinned,
                                inner_graph & inner) {
    const part_set rest = index_.layer(layer_.routing.layer).parts - layer_.done;
    const auto &   uses = layer_.plan.uses;
    const auto     here = [&](const planned_use & use) { return !is_on_cpu(use, st); };
    const bool     all =
        layer_.done == st.parts && ptrdiff_t(pinned.size()) == std::count_if(uses.begin(), uses.end(), here);
    for (const part_id part : rest) {
        const bool is_next = rest == part; // where slots are short, who waits for more loses its slot before
        for (size_t i = 0; i < pinned.size() && (all || is_next); i++) {
            cache_.request(pinned[i]->id, pinned[i]->tier, part);
        }
    }
    return prefetcher_ && all ? prefetcher_->look_ahead(layer_.routing.layer, layer_.router_input, inner.backend())
                              : status();
}

// Computes those of the pinned experts, the first in `todo`, that have arrived, with the rows that the CPU hands over,
// at least one, and takes them out. They are held for the stages to come, or, where slots are short, released.
status moe_executor::run_arrived(const stage & st, std::vector<const planned_use *> & todo, size_t & n_pinned,
                                 bool slots_are_short, inner_graph & inner) {
    const auto is_begun    = [&](const planned_use * use) { return share_ && share_->is_split(*use); };
    const auto has_arrived = [&](const planned_use * use) {
        return cache_.arrived(use->id, use->tier, st.parts) && !(is_begun(use) && share_->is_due_to_hand_over());
    };
    const auto end      = todo.begin() + ptrdiff_t(n_pinned);
    const auto none_has = [&] { return std::none_of(todo.begin(), end, has_arrived); };
    status     s;
    while (s.ok() && is_share_due() && none_has()) {
        s = compute_share(inner);
    }
    if (s.ok() && none_has()) {
        s = inner.compute();
        s = s.ok() ? cache_.wait(todo.front()->id, todo.front()->tier, st.parts) : s;
    }
    if (!s.ok()) {
        return s;
    }
    const auto first_missing = std::stable_partition(todo.begin(), end, has_arrived);

    const std::vector<const planned_use *> arrived(todo.begin(), first_missing);
    todo.erase(todo.begin(), first_missing);
    n_pinned -= arrived.size();
    held_.insert(held_.end(), arrived.begin(), arrived.end());
    if (std::any_of(arrived.begin(), arrived.end(), is_begun) && share_->has_rows_to_hand_over()) {
        s = inner.compute();
        s = s.ok() ? share_->hand_over(inner) : s;
    }
    s = s.ok() ? add_products(st, arrived, inner) : s;
    if (s.ok() && slots_are_short) {
        stats_.waves++;
        s = inner.compute();
        if (s.ok()) {
            release_held();
        }
    }
    return s;
}

status moe_executor::add_products(const stage & st, const std::vector<const planned_use *> & uses,
                                  inner_graph & inner) {
    status s;
    for (size_t i = 0; i < st.matmuls.size() && s.ok(); i++) {
        s = products_.add(st.matmuls[i], layer_.routing, uses, inner);
    }
    return s;
}

// What is computed between the products must find numbers in the CPU's rows, too.
status moe_executor::clear_share(const stage & st, inner_graph & inner) {
    if (!share_ || !share_->has_rows() || (st.parts & part_id::down)) {
        return {};
    }
    // what was added so far may still read this memory
    const status s = inner.compute();
    for (size_t i = 0; i < st.matmuls.size() && s.ok(); i++) {
        ggml_backend_tensor_memset(const_cast<ggml_tensor *>(st.matmuls[i]), 0, 0, ggml_nbytes(st.matmuls[i]));
    }
    return s;
}

// A skipped expert adds nothing to its token.
status moe_executor::clear_skipped(const ggml_tensor * tensor, inner_graph & inner) {
    if (layer_.plan.skipped.empty()) {
        return {};
    }
    GGML_ASSERT(ggml_nrows(tensor) == layer_.routing.n_tokens * layer_.routing.n_used);
    // what was added so far may still read this memory
    const status s = inner.compute();
    if (!s.ok()) {
        return s;
    }
    for (const int32_t row : layer_.plan.skipped) {
        ggml_backend_tensor_memset(const_cast<ggml_tensor *>(tensor), 0, row * tensor->nb[1],
                                   tensor->ne[0] * sizeof(float));
    }
    return {};
}

void moe_executor::release_held() {
    for (const planned_use * use : held_) {
        cache_.release(use->id, use->tier);
    }
    held_.clear();
}

} // namespace hobbit
