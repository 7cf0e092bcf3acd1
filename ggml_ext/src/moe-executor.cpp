// SPDX-License-Identifier: MIT
#include "moe-executor.h"

#include <algorithm>
#include <cstring>

namespace hobbit {

moe_executor::moe_executor(const expert_index & index, expert_cache & cache, const score_thresholds & thresholds,
                           stats & stats) :
    index_(index), cache_(cache), thresholds_(thresholds), stats_(stats) {}

status moe_executor::compute(ggml_cgraph * graph, inner_graph & inner) {
    if (!error_.ok()) {
        return error_;
    }
    const status s = run(graph, inner);
    release_held();
    if (!s.ok()) {
        plan_.ids = nullptr; // the layer is not done
    }
    if (!s.is_aborted()) {
        error_ = s;
    }
    return s;
}

static const expert_tensor & expert_of(const ggml_tensor * matmul) {
    return *static_cast<const expert_tensor *>(matmul->src[0]->extra);
}

// Nodes that a backend has nothing to do for.
static bool is_idle(const ggml_tensor * node) {
    return !(node->flags & GGML_TENSOR_FLAG_COMPUTE) || node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW ||
           node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

status moe_executor::run(ggml_cgraph * graph, inner_graph & inner) {
    const ggml_tensor * last = nullptr;
    status              s;
    for (int i = 0; i < ggml_graph_n_nodes(graph) && s.ok(); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (is_idle(node)) {
            continue;
        }
        last = node;
        if (node->op != GGML_OP_MUL_MAT_ID) {
            if (inner.full()) {
                s = flush(inner);
            }
            inner.add_copy(node);
            continue;
        }
        int         end = 0;
        const stage st  = next_stage(graph, i, end);
        s               = plan_layer(st, inner);
        if (s.ok()) {
            s = run_stage(st, inner);
        }
        last = st.matmuls.back();
        i    = end - 1;
    }
    if (s.ok()) {
        s = flush(inner);
    }
    if (s.ok() && last && (plan_.done & part_bit(PART_DOWN))) {
        s = clear_skipped(last, inner); // what a bias has added to them
    }
    return s;
}

status moe_executor::flush(inner_graph & inner) {
    const ggml_status result = inner.compute();
    if (result == GGML_STATUS_ABORTED) {
        return status::aborted();
    }
    if (result != GGML_STATUS_SUCCESS) {
        return status::error(format("%s failed to compute experts (%s)", ggml_backend_name(inner.backend()),
                                    ggml_status_to_string(result)));
    }
    return {};
}

static bool depends_on(const ggml_tensor * tensor, const ggml_tensor * other) {
    return tensor->data == other->data || (tensor->view_src && tensor->view_src == other);
}

// Gate and up share their input; a matmul that reads the output of another starts a new stage.
moe_executor::stage moe_executor::next_stage(ggml_cgraph * graph, int first, int & end) {
    stage s;
    for (end = first; end < ggml_graph_n_nodes(graph); end++) {
        const ggml_tensor * node = ggml_graph_node(graph, end);
        if (is_idle(node)) {
            continue;
        }
        const bool joins = node->op == GGML_OP_MUL_MAT_ID && !(s.parts & part_bit(expert_of(node).part)) &&
                           std::none_of(s.matmuls.begin(), s.matmuls.end(), [&](const ggml_tensor * m) {
                               return m->src[2] != node->src[2] || depends_on(node->src[1], m);
                           });
        if (!joins) {
            break;
        }
        s.matmuls.push_back(node);
        s.parts |= part_bit(expert_of(node).part);
    }
    return s;
}

//
// plan: which experts, in which precision
//

// The tensor's bytes, from the device's memory.
static std::vector<char> fetch(const ggml_tensor * tensor) {
    std::vector<char> bytes(ggml_nbytes(tensor));
    ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
    return bytes;
}

status moe_executor::read_selection(const ggml_tensor * matmul, std::vector<int32_t> & ids,
                                    std::vector<float> & weights) const {
    const ggml_tensor *     ids_tensor = matmul->src[2];
    const std::vector<char> raw        = fetch(ids_tensor);
    const int32_t           n_experts  = int32_t(matmul->src[0]->ne[2]);
    for (int64_t t = 0; t < ids_tensor->ne[1]; t++) {
        for (int64_t k = 0; k < ids_tensor->ne[0]; k++) {
            int32_t id;
            std::memcpy(&id, raw.data() + t * ids_tensor->nb[1] + k * ids_tensor->nb[0], sizeof(id));
            if (id < 0 || id >= n_experts) {
                return status::error(
                    format("the router chose expert %d of %d in '%s'", id, n_experts, matmul->src[0]->name));
            }
            ids.push_back(id);
        }
    }

    const ggml_tensor * weights_tensor = matmul->src[3];
    if (weights_tensor && ggml_is_contiguous(weights_tensor) && size_t(ggml_nelements(weights_tensor)) == ids.size()) {
        weights.resize(ids.size());
        ggml_backend_tensor_get(weights_tensor, weights.data(), 0, weights.size() * sizeof(float));
    } else if (thresholds_.t1 < 1.0) {
        return status::error(
            format("the router weights of '%s' are not known: run this model with t1 = 1", matmul->src[0]->name));
    }
    return {};
}

status moe_executor::plan_layer(const stage & st, inner_graph & inner) {
    const ggml_tensor * matmul = st.matmuls.front();
    const uint32_t      layer  = expert_of(matmul).layer;
    if (plan_.ids == matmul->src[2] && plan_.layer == layer && !(plan_.done & st.parts)) {
        plan_.done |= st.parts;
        return {};
    }
    if (!held_.empty()) { // another layer in the same graph
        const status s = flush(inner);
        if (!s.ok()) {
            return s;
        }
        release_held();
    }

    std::vector<int32_t> ids;
    std::vector<float>   weights;
    const status         s = read_selection(matmul, ids, weights);
    if (!s.ok()) {
        return s;
    }
    plan_.ids      = matmul->src[2];
    plan_.layer    = layer;
    plan_.n_used   = matmul->src[2]->ne[0];
    plan_.n_tokens = matmul->src[2]->ne[1];
    plan_.done     = st.parts;
    plan_.uses.clear();
    plan_.skipped.clear();
    stats_.layers_computed++;

    std::vector<precision> worth(ids.size(), PRECISION_HIGH);
    if (!weights.empty()) {
        for (int64_t t = 0; t < plan_.n_tokens; t++) {
            score_experts(&weights[t * plan_.n_used], plan_.n_used, thresholds_, &worth[t * plan_.n_used]);
        }
    }
    choose_tiers(ids, worth);
    return {};
}

// An expert gets the best precision that any of its tokens asks for, or a better one that is there already.
void moe_executor::choose_tiers(const std::vector<int32_t> & ids, const std::vector<precision> & worth) {
    const uint32_t          n_experts = index_.layer(plan_.layer).n_experts;
    const uint32_t          parts     = index_.layer(plan_.layer).parts;
    std::vector<expert_use> by_expert(n_experts);
    std::vector<precision>  best(n_experts, PRECISION_SKIP);
    for (size_t i = 0; i < ids.size(); i++) {
        by_expert[ids[i]].selections.push_back(int32_t(i));
        best[ids[i]] = std::max(best[ids[i]], worth[i]);
    }

    for (uint32_t e = 0; e < n_experts; e++) {
        expert_use & use = by_expert[e];
        if (use.selections.empty()) {
            continue;
        }
        use.id             = { plan_.layer, e };
        const bool has_low = cache_.n_slots(TIER_LOW) > 0;
        const bool high    = best[e] == PRECISION_HIGH || cache_.holds(use.id, TIER_HIGH, parts);
        const bool low     = best[e] == PRECISION_LOW || (has_low && cache_.holds(use.id, TIER_LOW, parts));
        if (!high && !low) {
            stats_.selections_skipped += use.selections.size();
            plan_.skipped.insert(plan_.skipped.end(), use.selections.begin(), use.selections.end());
            continue;
        }
        use.tier                     = high || !has_low ? TIER_HIGH : TIER_LOW;
        stats_.selections[use.tier] += use.selections.size();
        (cache_.holds(use.id, use.tier, parts) ? stats_.hits : stats_.misses)[use.tier]++;
        plan_.uses.push_back(std::move(use));
    }

    // what is there comes first: making room for another must not evict it
    std::stable_partition(plan_.uses.begin(), plan_.uses.end(),
                          [&](const expert_use & use) { return cache_.holds(use.id, use.tier, parts); });
}

//
// run
//

status moe_executor::run_stage(const stage & st, inner_graph & inner) {
    if (plan_.n_tokens > 1) {
        const status s = flush(inner); // the scratch memory is one stage's
        if (!s.ok()) {
            return s;
        }
    }
    if (!reserve(st, inner)) {
        return status::error(
            format("%s has no memory left for the rows of %lld tokens: use a smaller batch (--ubatch-size)",
                   ggml_backend_name(inner.backend()), (long long) plan_.n_tokens));
    }
    for (const ggml_tensor * matmul : st.matmuls) {
        const status s = clear_skipped(matmul, inner);
        if (!s.ok()) {
            return s;
        }
    }
    if (!held_.empty()) {
        return run_wave(st, held_, inner);
    }

    const bool first = plan_.done == st.parts;
    size_t     next  = 0;
    while (next < plan_.uses.size()) {
        std::vector<const expert_use *> wave;
        for (; next < plan_.uses.size() && cache_.acquire(plan_.uses[next].id, plan_.uses[next].tier); next++) {
            wave.push_back(&plan_.uses[next]);
            cache_.request(wave.back()->id, wave.back()->tier, st.parts);
        }
        GGML_ASSERT(!wave.empty()); // nothing is pinned between waves
        stats_.waves++;

        const bool whole_layer = first && wave.size() == plan_.uses.size();
        if (whole_layer) {
            held_ = wave;
            for (const expert_use * use : held_) {
                cache_.request(use->id, use->tier, index_.layer(plan_.layer).parts);
            }
            return run_wave(st, wave, inner);
        }
        status s = run_wave(st, wave, inner);
        if (s.ok()) {
            s = flush(inner);
        }
        for (const expert_use * use : wave) {
            cache_.release(use->id, use->tier);
        }
        if (!s.ok()) {
            return s;
        }
    }
    return {};
}

// Experts that have arrived are computed while the others are on their way.
status moe_executor::run_wave(const stage & st, const std::vector<const expert_use *> & wave, inner_graph & inner) {
    std::vector<const expert_use *> missing;
    for (const expert_use * use : wave) {
        if (!cache_.arrived(use->id, use->tier, st.parts)) {
            missing.push_back(use);
            continue;
        }
        const status s = add_products(st, *use, inner);
        if (!s.ok()) {
            return s;
        }
    }
    for (const expert_use * use : missing) {
        status s;
        if (!cache_.arrived(use->id, use->tier, st.parts)) {
            s = flush(inner);
        }
        if (s.ok()) {
            s = cache_.wait(use->id, use->tier, st.parts);
        }
        if (s.ok()) {
            s = add_products(st, *use, inner);
        }
        if (!s.ok()) {
            return s;
        }
    }
    return {};
}

status moe_executor::add_products(const stage & st, const expert_use & use, inner_graph & inner) {
    std::vector<int32_t> src_rows(use.selections.size());
    for (const ggml_tensor * matmul : st.matmuls) {
        if (inner.full()) {
            const status s = flush(inner);
            if (!s.ok()) {
                return s;
            }
        }
        // the input has a row per token, or one per selection
        const ggml_tensor * src = matmul->src[1];
        for (size_t i = 0; i < src_rows.size(); i++) {
            const int64_t token = use.selections[i] / plan_.n_used;
            const int64_t rank  = use.selections[i] % plan_.n_used;
            src_rows[i]         = int32_t(token * src->ne[1] + rank % src->ne[1]);
        }
        const uint32_t            part   = expert_of(matmul).part;
        const part_location &     at     = index_.locate(use.tier, plan_.layer, part, use.id.expert);
        const matrix_shape &      shape  = index_.layer(plan_.layer).shapes[part];
        const inner_graph::matrix weight = { at.type, shape.n_in, shape.n_out, cache_.data(use.id, use.tier, part),
                                             cache_.buffer(use.tier) };
        inner.add_product(weight, src, src_rows, matmul, use.selections);
    }
    return {};
}

bool moe_executor::reserve(const stage & st, inner_graph & inner) const {
    scratch_sizes sizes;
    if (plan_.n_tokens > 1) {
        for (const ggml_tensor * matmul : st.matmuls) {
            sizes.gathered = std::max(sizes.gathered, size_t(plan_.n_tokens * matmul->src[1]->ne[0]) * sizeof(float));
            sizes.product  = std::max(sizes.product, size_t(plan_.n_tokens * matmul->ne[0]) * sizeof(float));
        }
        sizes.rows = inner_graph::row_numbers_per_row * st.matmuls.size() * size_t(plan_.n_tokens * plan_.n_used);
    }
    return inner.reserve(sizes);
}

// A skipped expert adds nothing to its token.
status moe_executor::clear_skipped(const ggml_tensor * tensor, inner_graph & inner) {
    if (plan_.skipped.empty()) {
        return {};
    }
    GGML_ASSERT(ggml_nrows(tensor) == plan_.n_tokens * plan_.n_used);
    // what was added so far may still read this memory
    const status s = flush(inner);
    if (!s.ok()) {
        return s;
    }
    for (const int32_t row : plan_.skipped) {
        ggml_backend_tensor_memset(const_cast<ggml_tensor *>(tensor), 0, row * tensor->nb[1],
                                   tensor->ne[0] * sizeof(float));
    }
    return {};
}

void moe_executor::release_held() {
    for (const expert_use * use : held_) {
        cache_.release(use->id, use->tier);
    }
    held_.clear();
}

} // namespace hobbit
