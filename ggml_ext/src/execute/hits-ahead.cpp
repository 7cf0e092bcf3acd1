// SPDX-License-Identifier: MIT
#include "execute/hits-ahead.h"

#include "device/device-traits.h"
#include "ggml-alloc.h"
#include "graph/routing.h"
#include "offload/cpu-rows.h"

#include <algorithm>
#include <cstring>

namespace hobbit {

// One set of places for all layers, since they run one after the other.
bool hits_ahead::reserve(ggml_backend_t backend) {
    if (memory_ || is_refused_) {
        return !is_refused_;
    }
    bool has_others = false; // kernels for other types do work for matrices that a token does not use
    index_.each_matrix(tier_id::high, [&](expert_id id, part_id part, const part_location & at) {
        const part_location & first   = index_.locate(tier_id::high, id.layer, part, 0);
        const bool            is_even = !cache_.in_host() || data_offset(at) == data_offset(first);
        has_others                    = has_others || at.type != first.type || !ggml_is_quantized(at.type) || !is_even;
    });
    ggml_backend_dev_t     device = ggml_backend_get_device(backend);
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device, &props);
    int64_t widest  = 0;
    int64_t largest = 0; // all that a layer computes of a row
    ctx_.reset(ggml_init({ (index_.n_layers() + 4) * ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true }));
    for (layer_id layer = 0; layer < index_.n_layers(); layer++) {
        tables_.push_back(ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_I32, 1, index_.n_experts()));
        int64_t all = 0;
        for (const matrix_shape & shape : index_.layer(layer).shapes) {
            widest  = std::max(widest, shape.n_in);
            all    += shape.n_in + 2 * shape.n_out; // the product, and what is made of it
        }
        largest = std::max(largest, all);
    }
    numbers_    = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_I32, index_.n_experts_used());
    saved_      = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, widest);
    is_refused_ = has_others || !props.caps.events || !traits_of(device).copies_in_streams ||
                  !ggml_backend_supports_op(backend, ggml_get_rows(ctx_.get(), tables_.front(), numbers_)) ||
                  !ggml_backend_supports_op(backend, ggml_cont(ctx_.get(), saved_));
    if (!is_refused_) {
        memory_.reset(ggml_backend_alloc_ctx_tensors(ctx_.get(), backend));
        images_ = alloc_host_buffer(backend, tables_.size() * ggml_nbytes(tables_.front()));
        places_.reset(ggml_backend_alloc_buffer(backend, size_t(largest) * index_.n_experts_used() * sizeof(float)));
        is_refused_ = !memory_ || !images_ || !places_;
        if (!is_refused_) { // no table was sent
            ggml_backend_buffer_clear(images_.get(), 0xff);
        }
    }
    return !is_refused_;
}

// Makes the table of the experts that are there, in one bank of the pool.
bool hits_ahead::look_for_experts() {
    const auto has    = cache_.loaded(layer_, tier_id::high, index_.layer(layer_).parts);
    const auto first  = uint32_t(std::find(has.begin(), has.end(), true) - has.begin());
    const auto buffer = [&](uint32_t e) { return cache_.buffer({ layer_, e }, tier_id::high, part_id::down); };
    table_.assign(has.size(), NONE);
    for (uint32_t expert = first; expert < has.size(); expert++) {
        if (has[expert] && buffer(expert) == buffer(first)) {
            table_[expert] = int32_t(cache_.number({ layer_, expert }, tier_id::high));
        }
    }
    standing_in_ = { layer_, first };
    return first < has.size();
}

static bool is_constant(const ggml_tensor * tensor) {
    return ggml_backend_buffer_get_usage(root_of(tensor)->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// The section computes rows of its own from this input alone.
static bool reads_only(const ggml_tensor * input, const std::vector<const ggml_tensor *> & nodes) {
    const auto is_given = [&](const ggml_tensor * source) {
        const bool is_made = std::find(nodes.begin(), nodes.end(), root_of(source)) != nodes.end();
        return source == input || is_made || is_constant(source);
    };
    return std::all_of(nodes.begin(), nodes.end(), [&](const ggml_tensor * node) {
        const int i = node->op == GGML_OP_MUL_MAT_ID ? 1 : 0; // the source after the experts, before their numbers
        return is_given(node->src[i]) && (i == 1 || !node->src[1] || is_given(node->src[1]));
    });
}

// The section's rows have places of their own.
static bool has_room(const std::vector<const ggml_tensor *> & nodes, ggml_backend_buffer_t places) {
    size_t needed = 0;
    for (const ggml_tensor * node : nodes) {
        needed += node->view_src ? 0 : GGML_PAD(ggml_nbytes(node), ggml_backend_buffer_get_alignment(places));
    }
    return needed <= ggml_backend_buffer_get_size(places);
}

bool hits_ahead::can_launch(const layer_section & section, inner_graph & inner) {
    const ggml_tensor * matmul = ggml_graph_node(section.graph, section.first);
    layer_                     = expert_of(matmul).layer;
    input_                     = matmul->src[1];
    if (!inner.in_queue() || !inner.can_begin_layer(layer_) || matmul->ne[2] != 1 ||
        matmul->ne[1] != int64_t(index_.n_experts_used()) || cache_.n_slots(tier_id::high) == 0 ||
        !ggml_is_contiguous(input_) || input_->ne[1] != 1) {
        return false; // the CPU asks for each layer too, so the graph is searched last
    }
    nodes_ = nodes_of(section);
    return section.parts == index_.layer(layer_).parts &&
           cpu_rows::can_share(section, { layer_, 1, matmul->ne[1], {}, {} }) && reads_only(input_, nodes_) &&
           reserve(inner.backend()) && has_room(nodes_, places_.get()) && look_for_experts();
}

status hits_ahead::launch(inner_graph & inner) {
    const bool is_pinned = cache_.lend(standing_in_, tier_id::high, load_urgency::prefetch);
    GGML_ASSERT(is_pinned);
    const auto   number = int32_t(cache_.number(standing_in_, tier_id::high));
    const size_t size   = ggml_nbytes(tables_[layer_]);
    auto *       image  = static_cast<char *>(ggml_backend_buffer_get_base(images_.get())) + layer_ * size;
    auto         table  = table_;
    std::replace(table.begin(), table.end(), NONE, number);
    if (std::memcmp(image, table.data(), size) != 0) {
        std::memcpy(image, table.data(), size);
        ggml_backend_tensor_set_async(inner.backend(), tables_[layer_], image, 0, size);
        inner.count_copy(size);
    }
    inner.begin_layer(layer_);
    move_input(inner, input_, saved_);
    ggml_tensor * numbers = inner.add_look_up(tables_[layer_], nodes_.front()->src[2], numbers_);
    for (const ggml_tensor * node : nodes_) {
        if (node->op == GGML_OP_MUL_MAT_ID) {
            const part_id part = expert_of(node).part;
            inner.add_matmul(node, stack_of(index_, cache_, standing_in_, tier_id::high, part), numbers);
        } else {
            inner.add_copy(node);
        }
    }
    return inner.launch();
}

status hits_ahead::launch_missing(const layer_routing & routing, const std::vector<const planned_use *> & uses,
                                  inner_graph & inner) {
    std::vector<int32_t> rows;
    std::vector<int32_t> experts;
    for (const planned_use * use : uses) {
        for (const int32_t row : use->selections) {
            rows.push_back(row);
            experts.push_back(routing.experts[size_t(row)]);
        }
    }
    HOBBIT_TRY(inner.full(4 * nodes_.size()) ? inner.compute() : status());
    copies_.begin(nodes_.size(), int64_t(rows.size()), 1);
    copies_.set(nodes_.front()->src[2], inner.row_numbers(experts));
    copies_.set(input_, &to_);
    std::vector<ggml_tensor *> repeated;
    for (const ggml_tensor * node : nodes_) {
        for (ggml_tensor * source : node->src) {
            if (source && is_constant(source)) {
                copies_.set(source, source);
            }
        }
        repeated.push_back(copies_.repeat(node));
    }
    place_copies();
    HOBBIT_TRY(products_.add_section(repeated, layer_, uses, inner));
    for (const ggml_tensor * result : results_of(nodes_)) {
        inner.add_scatter(result, copies_.of(result), rows);
    }
    return inner.launch();
}

// One set of places, since an expert's rows are computed behind those of others.
void hits_ahead::place_copies() {
    ggml_tallocr places = ggml_tallocr_new(places_.get());
    for (ggml_tensor * t = ggml_get_first_tensor(copies_.ctx()); t; t = ggml_get_next_tensor(copies_.ctx(), t)) {
        t->view_src ? ggml_backend_view_init(t) : ggml_tallocr_alloc(&places, t);
    }
}

void hits_ahead::move_input(inner_graph & inner, const ggml_tensor * from, const ggml_tensor * to) {
    const auto at = [&](ggml_tensor & t, const ggml_tensor * place) {
        t          = *input_;
        t.data     = place->data;
        t.buffer   = root_of(place)->buffer;
        t.view_src = nullptr;
    };
    at(from_, from);
    at(to_, to);
    to_.op     = GGML_OP_CONT;
    to_.src[0] = &from_;
    std::fill(to_.src + 1, to_.src + GGML_MAX_SRC, nullptr);
    inner.add_copy(&to_);
}

bool hits_ahead::has(const planned_use & use, const layer_routing & routing) const {
    const auto is_it = [&](int32_t i) { return routing.experts[size_t(i)] == int32_t(use.id.expert); };
    return use.tier == tier_id::high && table_[use.id.expert] != NONE &&
           std::all_of(use.selections.begin(), use.selections.end(), is_it);
}

std::vector<expert_id> hits_ahead::take_pins(const layer_routing & routing) {
    std::vector<expert_id> pinned = { standing_in_ };
    for (const int32_t expert : routing.experts) {
        const expert_id id = { layer_, uint32_t(expert) };
        if (table_[id.expert] != NONE && cache_.lend(id, tier_id::high, load_urgency::prefetch)) {
            pinned.push_back(id);
        }
    }
    return pinned;
}

} // namespace hobbit
