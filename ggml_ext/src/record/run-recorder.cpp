// SPDX-License-Identifier: MIT
#include "record/run-recorder.h"

#include <cmath>
#include <set>

namespace hobbit {

static uint64_t expert_bytes(const expert_index & index, tier_id tier, expert_id id) {
    uint64_t bytes = 0;
    for (const part_id part : index.layer(id.layer).parts) {
        bytes += index.locate(tier, id.layer, part, id.expert).size;
    }
    return bytes;
}

// Bytes of one expert in high precision, or in low if the layer has no other.
static uint64_t best_expert_bytes(const expert_index & index, layer_id layer) {
    const uint32_t n_experts = index.layer(layer).n_experts;
    uint32_t       expert    = 0;
    while (expert < n_experts && !index.has(tier_id::high, { layer, expert })) {
        expert++;
    }
    return expert_bytes(index, expert < n_experts ? tier_id::high : tier_id::low, { layer, expert % n_experts });
}

status run_recorder::open_trace(const std::string & path, const expert_index & index) {
    index_ = &index;
    trace_header header;
    header.model        = index.files()[0];
    header.architecture = index.architecture();
    header.n_layers     = uint32_t(index.n_layers());
    header.n_experts    = index.n_experts();
    for (layer_id layer = 0; layer < header.n_layers; layer++) {
        header.expert_bytes.push_back(best_expert_bytes(index, layer));
        header.n_used.push_back(index.layer(layer).n_used);
    }
    return trace_.open(path, header);
}

void run_recorder::set_observer(hobbit_observer observer, void * user_data) {
    observer_  = observer;
    user_data_ = user_data;
}

void run_recorder::begin_sequence(int32_t sequence) {
    trace_.begin_sequence(sequence);
}

void run_recorder::begin_batch(const batch_info & batch) {
    if (trace_.is_open()) {
        trace_.begin_batch(batch.tokens());
    }
}

void run_recorder::record(const layer_report & report) {
    if (trace_.is_open() && error_.ok()) {
        write(report);
    }
    if (observer_) {
        call_observer(report);
    }
}

void run_recorder::write(const layer_report & report) {
    const layer_routing &        routing = report.routing;
    std::vector<trace_residency> before;
    std::vector<uint64_t>        bytes;

    std::set<std::pair<int32_t, tier_id>> asked; // reads of experts
    for (size_t i = 0; i < routing.experts.size(); i++) {
        const auto &  was    = report.was_resident[i];
        const tier_id tier   = tier_of(report.plan.precisions[i]);
        const bool    served = report.plan.precisions[i] != precision::skip;
        before.push_back(was[tier_id::high] ? TRACE_HIGH : was[tier_id::low] ? TRACE_LOW : TRACE_MISSING);
        const bool reads = served && !was[tier] && asked.insert({ routing.experts[i], tier }).second;
        bytes.push_back(reads ? expert_bytes(*index_, tier, { routing.layer, uint32_t(routing.experts[i]) }) : 0);
    }

    error_ = trace_.add(
        { routing.layer, uint32_t(routing.n_used), report.rows, routing.experts, routing.weights, before, bytes });
}

static std::vector<float> norms_of_rows(const ggml_tensor * tensor, size_t n_rows) {
    std::vector<float> row(tensor->ne[0]);
    std::vector<float> norms;
    for (size_t i = 0; i < n_rows; i++) {
        ggml_backend_tensor_get(tensor, row.data(), i * tensor->nb[1], row.size() * sizeof(float));
        double sum = 0.0;
        for (const float x : row) {
            sum += double(x) * double(x);
        }
        norms.push_back(float(std::sqrt(sum)));
    }
    return norms;
}

void run_recorder::call_observer(const layer_report & report) const {
    const layer_routing & routing = report.routing;
    std::vector<int32_t>  sequences;
    std::vector<int32_t>  positions;
    for (const batch_info::row & row : report.rows) {
        sequences.push_back(row.sequence);
        positions.push_back(row.position);
    }
    std::vector<uint8_t> precisions;
    for (const precision p : report.plan.precisions) {
        precisions.push_back(uint8_t(p));
    }
    const std::vector<float>   norms = norms_of_rows(report.output, routing.experts.size());
    const std::vector<float> & input = report.router_input;

    hobbit_layer_event event = {};
    event.layer              = routing.layer;
    event.n_tokens           = uint32_t(routing.n_tokens);
    event.n_used             = uint32_t(routing.n_used);
    event.n_embd             = input.empty() ? 0 : uint32_t(input.size() / size_t(routing.n_tokens));
    event.sequences          = sequences.data();
    event.positions          = positions.data();
    event.experts            = routing.experts.data();
    event.weights            = routing.weights.empty() ? nullptr : routing.weights.data();
    event.precisions         = precisions.data();
    event.router_input       = input.empty() ? nullptr : input.data();
    event.output_norms       = norms.data();
    observer_(&event, user_data_);
}

} // namespace hobbit
