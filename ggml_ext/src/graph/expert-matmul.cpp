// SPDX-License-Identifier: MIT
#include "graph/expert-matmul.h"

#include "device/device-traits.h"
#include "plan/batch-info.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace hobbit {

// The most rows that are gathered for one operation: enough for any one expert, and for an efficient operation.
static size_t rows_at_once(const layer_routing & routing) {
    return size_t(std::max(routing.n_tokens, inner_graph::enough_rows));
}

// The rows that each operation has numbers and places for, whatever it computes: see inner_graph::add_matmul.
static size_t least_places(const layer_routing & routing) {
    return routing.n_tokens <= batch_info::max_generated ? routing.experts.size() : 0;
}

status expert_matmuls::reserve(const layer_routing & routing, inner_graph & inner) const {
    const layer_shape &        layer       = index_.layer(routing.layer);
    const size_t               n_rows      = rows_at_once(routing);
    const size_t               n_numbers   = std::max(inner_graph::row_numbers_per_row, least_places(routing));
    const size_t               n_from_host = std::min(routing.experts.size(), size_t(inner_graph::enough_rows));
    const bool                 is_host     = is_host_device(ggml_backend_get_device(inner.backend()));
    inner_graph::scratch_sizes sizes;
    for (const part_id part : layer.parts) {
        const matrix_shape & shape  = layer.shapes[part];
        sizes.gathered              = std::max(sizes.gathered, n_rows * size_t(shape.n_in) * sizeof(float));
        sizes.product               = std::max(sizes.product, n_rows * size_t(shape.n_out) * sizeof(float));
        sizes.rows                 += n_numbers * routing.experts.size();
        if (!is_host) { // rows that the CPU computes, or zeros
            sizes.values += n_from_host * (size_t(shape.n_out) + 1) * sizeof(float);
        }
    }
    if (sizes.fits(inner.scratch())) {
        return {};
    }
    HOBBIT_TRY(inner.compute());
    if (!inner.reserve(sizes)) {
        return status::error("%s has no memory left for the rows of %lld tokens: use a smaller batch (--ubatch-size)",
                             ggml_backend_name(inner.backend()), (long long) routing.n_tokens);
    }
    return {};
}

matrices stack_of(const expert_index & index, const expert_cache & cache, expert_id id, tier_id tier, part_id part) {
    const matrix_shape & shape  = index.layer(id.layer).shapes[part];
    const size_t         stride = cache.stride(id, tier, part);
    char *               first  = cache.data(id, tier, part) - cache.number(id, tier) * stride;
    const ggml_type      type   = index.locate(tier, id.layer, part, id.expert).type;
    return {
        type, shape.n_in, shape.n_out, first, stride, int32_t(cache.n_numbers(id, tier)), cache.buffer(id, tier, part)
    };
}

status expert_matmuls::add(const ggml_tensor * matmul, const layer_routing & routing,
                           const std::vector<const planned_use *> & uses, inner_graph & inner) const {
    using place = std::tuple<ggml_backend_buffer_t, char *, size_t, ggml_type>; // the stack that a matrix is in

    std::map<place, std::vector<const planned_use *>> alike;
    for (const planned_use * use : uses) {
        const matrices stack = stack_of(index_, cache_, use->id, use->tier, expert_of(matmul).part);
        alike[{ stack.buffer, stack.data, stack.stride, stack.type }].push_back(use);
    }
    for (auto & each : alike) {
        HOBBIT_TRY(add_alike(matmul, routing, std::move(each.second), inner));
    }
    return {};
}

status expert_matmuls::add_section(const std::vector<ggml_tensor *> & nodes, layer_id layer,
                                   const std::vector<const planned_use *> & uses, inner_graph & inner) const {
    layer_routing                    routing = { layer, nodes.front()->ne[2], nodes.front()->ne[1], {}, {} };
    std::vector<planned_use>         own; // uses with the numbers of these rows
    std::vector<const planned_use *> served;
    own.reserve(uses.size());
    for (const planned_use * use : uses) {
        own.push_back(*use);
        std::iota(own.back().selections.begin(), own.back().selections.end(), int32_t(routing.experts.size()));
        routing.experts.resize(routing.experts.size() + use->selections.size()); // the use has its number
        served.push_back(&own.back());
    }
    HOBBIT_TRY(reserve(routing, inner));
    for (const ggml_tensor * node : nodes) {
        if (node->op == GGML_OP_MUL_MAT_ID) {
            HOBBIT_TRY(add(node, routing, served, inner));
            continue;
        }
        HOBBIT_TRY(inner.full() ? inner.compute() : status());
        inner.add_copy(node);
    }
    return {};
}

static status add_rows(const ggml_tensor * matmul, const matrices & weights, const std::vector<served_row> & rows,
                       inner_graph & inner) {
    HOBBIT_TRY(inner.full() ? inner.compute() : status());
    inner.add_matmul(matmul, weights, rows);
    return {};
}

// The operations of a large pool may need more, which fits into the hundredth of the budget that is left free.
size_t expert_matmuls::max_work_size(tier_id tier) const {
    return std::max(inner_graph::max_work_size, cache_.bytes(tier) / 256);
}

status expert_matmuls::add_alike(const ggml_tensor * matmul, const layer_routing & routing,
                                 std::vector<const planned_use *> uses, inner_graph & inner) const {
    const planned_use & any     = *uses.front();
    const matrices      weights = stack_of(index_, cache_, any.id, any.tier, expert_of(matmul).part);
    const auto          slot    = [&](const planned_use * use) { return cache_.number(use->id, use->tier); };
    const auto          by_slot = [&](const planned_use * a, const planned_use * b) { return slot(a) < slot(b); };
    const size_t        most    = max_work_size(uses.front()->tier);
    const size_t        least   = least_places(routing);
    const auto          is_work = [&](size_t n_slots, size_t n_places) {
        return inner_graph::work_size(n_slots, std::max(n_places, least)) <= most;
    };
    std::sort(uses.begin(), uses.end(), by_slot);

    std::vector<served_row> rows;
    for (const planned_use * use : uses) {
        for (const int32_t row : use->selections) {
            rows.push_back({ row, int32_t(slot(use)) });
        }
    }
    const size_t span      = slot(uses.back()) - slot(uses.front()) + 1;
    const size_t n_at_once = rows_at_once(routing);
    const bool   in_host   = ggml_backend_buffer_is_host(weights.buffer);
    const auto   add_them  = [&] { return add_rows(matmul, weights, std::exchange(rows, {}), inner); };
    if (rows.size() == routing.experts.size() && inner_graph::are_distinct(matmul, rows) &&
        is_work(span, in_host ? rows.size() : size_t(routing.n_tokens))) {
        return add_them();
    }
    rows.clear();
    for (const planned_use * use : uses) {
        const size_t n = rows.size() + use->selections.size();
        if (!rows.empty() && (n > n_at_once || !is_work(slot(use) - rows.front().matrix + 1, n))) {
            HOBBIT_TRY(add_them());
        }
        for (const int32_t row : use->selections) { // more than there are tokens, if some choose an expert twice
            if (rows.size() == n_at_once) {
                HOBBIT_TRY(add_them());
            }
            rows.push_back({ row, int32_t(slot(use)) });
        }
    }
    return add_them();
}

} // namespace hobbit
