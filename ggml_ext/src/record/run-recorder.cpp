// SPDX-License-Identifier: MIT
#include "record/run-recorder.h"

#include <cmath>

namespace hobbit {

void run_recorder::set_observer(hobbit_observer observer, void * user_data) {
    observer_  = observer;
    user_data_ = user_data;
}

void run_recorder::begin_batch(const batch_info & batch) {
    if (trace_.is_open()) {
        trace_.begin_batch(batch.tokens());
    }
}

void run_recorder::record(const layer_report & report) {
    if (trace_.is_open() && error_.ok()) {
        error_ = trace_.add(report);
    }
    if (observer_) {
        call_observer(report);
    }
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
