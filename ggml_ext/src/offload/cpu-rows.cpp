// SPDX-License-Identifier: MIT
#include "offload/cpu-rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hobbit {

static bool is_float_rows(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->ne[3] == 1;
}

//
// sections that the CPU can compute
//

// A row for each selection, as the section computes them, or as it is given them, also one for each token.
static bool has_rows(const ggml_tensor * t, const layer_routing & routing, bool is_computed) {
    if (!is_float_rows(t)) {
        return false;
    }
    const ggml_tensor * root = root_of(t);
    if (is_computed) {
        return ggml_nrows(t) == routing.n_used * routing.n_tokens && t->nb[1] == root->nb[1] &&
               t->view_offs < root->nb[1];
    }
    return t->ne[2] == routing.n_tokens && (t->ne[1] == 1 || t->ne[1] == routing.n_used);
}

// The sources that have rows; a matmul's first one is the weights.
static const ggml_tensor * row_source(const ggml_tensor * node, size_t i) {
    return node->op == GGML_OP_MUL_MAT_ID ? node->src[1] : node->src[i];
}

bool cpu_rows::can_share(const layer_section & section, const layer_routing & routing) {
    const std::vector<const ggml_tensor *> nodes = nodes_of(section);
    const ggml_tensor *                    ids   = nodes.front()->src[2];
    for (size_t n = 0; n < nodes.size(); n++) {
        const ggml_tensor * node        = nodes[n];
        const auto          is_computed = [&](const ggml_tensor * t) {
            return std::find(nodes.begin(), nodes.begin() + ptrdiff_t(n), root_of(t)) != nodes.begin() + ptrdiff_t(n);
        };
        bool ok = n_row_sources(node) > 0 && (!node->view_src || is_computed(node)) && has_rows(node, routing, true) &&
                  node->nb[1] == size_t(node->ne[0]) * sizeof(float);
        for (size_t i = 0; i < n_row_sources(node); i++) {
            const ggml_tensor * source = row_source(node, i);
            ok                         = ok && has_rows(source, routing, is_computed(source));
        }
        if (node->op == GGML_OP_ADD_ID) {
            ok = ok && node->src[2] == ids && ggml_is_contiguous(node->src[1]) && !is_computed(node->src[1]);
        }
        if (!ok) {
            return false;
        }
    }
    return true;
}

//
// copies of what the section reads
//

std::vector<const ggml_tensor *> cpu_rows::inputs_of(const std::vector<const ggml_tensor *> & nodes) {
    std::vector<const ggml_tensor *> inputs;
    for (const ggml_tensor * node : nodes) {
        for (size_t i = 0; i < n_row_sources(node); i++) {
            const ggml_tensor * source  = row_source(node, i);
            const bool          is_made = std::find(nodes.begin(), nodes.end(), root_of(source)) != nodes.end();
            if (!is_made && std::find(inputs.begin(), inputs.end(), source) == inputs.end()) {
                inputs.push_back(source);
            }
        }
    }
    return inputs;
}

void cpu_rows::fetch(const host_copy & known, inner_graph & device) {
    std::vector<const ggml_tensor *> wanted = inputs_of(nodes_);
    if (const auto at = std::find(wanted.begin(), wanted.end(), known.tensor); at != wanted.end()) {
        inputs_[known.tensor] = known.bytes;
        wanted.erase(at);
    }
    for (const ggml_tensor * node : nodes_) {
        if (node->op == GGML_OP_ADD_ID) {
            wanted.push_back(node->src[1]);
        }
    }
    if (wanted.empty()) {
        return;
    }
    const std::vector<const char *> bytes = device.read(wanted);
    for (size_t i = 0; i < wanted.size(); i++) {
        inputs_[wanted[i]].assign(bytes[i], bytes[i] + ggml_nbytes(wanted[i]));
    }
}

void cpu_rows::begin(std::vector<const ggml_tensor *> nodes, const layer_routing & routing,
                     const std::vector<const planned_use *> & uses, const host_copy & known, inner_graph & device) {
    nodes_   = std::move(nodes);
    routing_ = &routing;
    uses_.clear();
    rows_.clear();
    inputs_.clear();
    next_use_ = 0;
    next_row_ = 0;
    for (const planned_use * use : uses) {
        uses_.push_back(*use);
        rows_.insert(rows_.end(), use->selections.begin(), use->selections.end());
    }
    results_.clear();
    for (const ggml_tensor * outer : results_of(nodes_)) {
        results_.push_back({ outer, std::vector<float>(rows_.size() * size_t(outer->ne[0])) });
    }
    fetch(known, device);
}

//
// the section's operations on some of the rows
//

cpu_rows::piece cpu_rows::next() const {
    const size_t most = size_t(std::max(routing_->n_tokens, inner_graph::enough_rows));
    piece        p    = { next_use_, next_use_, next_row_, 0 };
    while (p.end < uses_.size() && p.n_rows < size_t(inner_graph::enough_rows)) {
        const size_t n = uses_[p.end].selections.size();
        if (p.end > p.first && p.n_rows + n > most) {
            break;
        }
        p.n_rows += n;
        p.end++;
    }
    return p;
}

status cpu_rows::compute_next(inner_graph & cpu) {
    HOBBIT_TRY(begin_next(cpu));
    HOBBIT_TRY(cpu.compute());
    end_next();
    return {};
}

void cpu_rows::end_next() {
    const piece p = next();
    keep_results(p);
    next_use_ = p.end;
    next_row_ = p.first_row + p.n_rows;
}

status cpu_rows::begin_next(inner_graph & cpu) {
    const piece p = next();
    copies_.begin(nodes_.size(), 1, int64_t(p.n_rows));
    ggml_tensor * experts = ggml_new_tensor_2d(copies_.ctx(), GGML_TYPE_I32, 1, int64_t(p.n_rows));
    copies_.set(nodes_.front()->src[2], experts);
    for (const ggml_tensor * node : nodes_) {
        if (node->op == GGML_OP_ADD_ID) { // a constant is used where its copy is
            ggml_tensor * bias = ggml_new_tensor(copies_.ctx(), node->src[1]->type, GGML_MAX_DIMS, node->src[1]->ne);
            bias->data         = inputs_.at(node->src[1]).data();
            copies_.set(node->src[1], bias);
        }
    }
    std::vector<ggml_tensor *> repeated;
    for (const ggml_tensor * node : nodes_) {
        repeated.push_back(copies_.repeat(node));
    }
    memory_.reset(ggml_backend_alloc_ctx_tensors_from_buft(copies_.ctx(), ggml_backend_cpu_buffer_type()));
    if (!memory_) {
        return status::error(format("no memory left for %zu rows of experts on the CPU: use a smaller batch "
                                    "(--ubatch-size)",
                                    p.n_rows));
    }
    for (size_t i = 0; i < p.n_rows; i++) {
        static_cast<int32_t *>(experts->data)[i] = routing_->experts[size_t(rows_[p.first_row + i])];
    }
    for (const auto & [outer, bytes] : inputs_) {
        ggml_tensor * copy = copies_.of(outer);
        if (!copy->view_src && copy->data != bytes.data()) {
            fill(outer, copy, p);
        }
    }
    std::vector<const planned_use *> uses;
    for (size_t i = p.first; i < p.end; i++) {
        uses.push_back(&uses_[i]);
    }
    return products_.add_section(repeated, routing_->layer, uses, cpu);
}

// The rows of an input that has one for each selection, or for each token.
void cpu_rows::fill(const ggml_tensor * outer, ggml_tensor * copy, const piece & p) {
    const std::vector<char> & from = inputs_.at(outer);
    for (size_t i = 0; i < p.n_rows; i++) {
        const int64_t row    = rows_[p.first_row + i];
        const int64_t token  = row / routing_->n_used;
        const int64_t rank   = row % routing_->n_used % outer->ne[1];
        const size_t  offset = size_t(token) * outer->nb[2] + size_t(rank) * outer->nb[1];
        std::memcpy(static_cast<char *>(copy->data) + i * copy->nb[2], from.data() + offset, copy->nb[1]);
    }
}

//
// results
//

void cpu_rows::keep_results(const piece & p) {
    for (result & r : results_) {
        const size_t n = size_t(r.outer->ne[0]);
        std::memcpy(&r.values[p.first_row * n], copies_.of(r.outer)->data, p.n_rows * n * sizeof(float));
    }
}

size_t cpu_rows::find(const planned_use & use) const {
    const auto is_it = [&](const planned_use & own) { return own.id == use.id && own.tier == use.tier; };
    return size_t(std::find_if(uses_.begin(), uses_.end(), is_it) - uses_.begin());
}

size_t cpu_rows::adopt(const cpu_rows & other) {
    for (; next_use_ < uses_.size() && other.has(uses_[next_use_]); next_use_++) {
        const size_t row = other.find(uses_[next_use_]);                   // a use has one there
        const size_t end = next_row_ + uses_[next_use_].selections.size(); // and two if a token chose it twice
        for (; next_row_ < end; next_row_++) {
            for (size_t i = 0; i < results_.size(); i++) {
                const size_t n = size_t(results_[i].outer->ne[0]);
                std::copy_n(&other.results_[i].values[row * n], n, &results_[i].values[next_row_ * n]);
            }
        }
    }
    return next_use_;
}

status cpu_rows::copy_back(inner_graph & device) {
    for (const result & r : results_) {
        HOBBIT_TRY(device.add_rows(r.outer, r.values.data(), rows_));
    }
    return device.launch();
}

uint64_t cpu_rows::size(const expert_index & index, uint64_t n_rows, uint64_t n_at_once) {
    uint64_t kept     = 0;
    uint64_t computed = 0;
    uint64_t staged   = 0;
    for (layer_id layer = 0; layer < index.n_layers(); layer++) {
        uint64_t widest = 0;
        uint64_t all    = 0;
        uint64_t out    = 0;
        for (const matrix_shape & shape : index.layer(layer).shapes) {
            widest  = std::max(widest, uint64_t(shape.n_out));
            all    += uint64_t(shape.n_in) + 2 * uint64_t(shape.n_out); // the product, and what is made of it
            out    += uint64_t(shape.n_out);
        }
        kept     = std::max(kept, 2 * widest);  // gate and up, where a section ends with them
        computed = std::max(computed, 2 * all); // and the scratch memory
        staged   = std::max(staged, out);
    }
    return (n_rows * kept + n_at_once * computed + uint64_t(inner_graph::enough_rows) * staged) * sizeof(float);
}

} // namespace hobbit
