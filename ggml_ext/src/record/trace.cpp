// SPDX-License-Identifier: MIT
#include "record/trace.h"

#include <algorithm>
#include <cmath>

namespace hobbit {

// Replaces what would break a line.
static std::string one_line(std::string text) {
    std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, '?');
    return text;
}

// Mean bytes of a layer's experts, each in the best precision that it has.
static uint64_t best_expert_bytes(const expert_index & index, layer_id layer) {
    uint64_t bytes = 0;
    for (uint32_t e = 0; e < index.layer(layer).n_experts; e++) {
        const expert_id id  = { layer, e };
        bytes              += index.expert_bytes(id, index.has(tier_id::high, id) ? tier_id::high : tier_id::low);
    }
    return bytes / index.layer(layer).n_experts;
}

static constexpr const char * MAGIC = "# route_trace v1\n";

status trace_writer::open(const std::string & path, const expert_index & index) {
    index_ = &index;
    turns_.clear();
    batch_.clear();
    n_turns_ = 0;
    HOBBIT_TRY(text_file::open(path, "trace", MAGIC));
    const uint32_t n_used = index.n_experts_used();
    std::string    text =
        format("# model=%s arch=%s n_layer=%zu n_expert=%u n_expert_used=%u\n", one_line(index.files()[0]).c_str(),
               one_line(index.architecture()).c_str(), index.n_layers(), index.n_experts(), n_used);
    for (layer_id layer = 0; layer < index.n_layers(); layer++) {
        const uint32_t own  = index.layer(layer).n_used;
        text               += format("# layer=%u expert_bytes=%llu dense_bytes=0", uint32_t(layer),
                                     (unsigned long long) best_expert_bytes(index, layer));
        text               += (own < n_used ? format(" n_expert_used=%u", own) : "") + "\n";
    }
    text += "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";
    return append(text.data(), text.size());
}

void trace_writer::begin_batch(const std::vector<batch_info::row> & tokens) {
    if (!is_open()) {
        return;
    }
    batch_.clear();
    std::map<int32_t, uint32_t> n_of; // [sequence] tokens in the batch
    for (const batch_info::row & row : tokens) {
        if (n_of[row.sequence]++ == 0 && row.position == 0) {
            begin_sequence(row.sequence);
        }
    }
    for (const batch_info::row & row : tokens) {
        const auto [found, is_new]  = turns_.emplace(row.sequence, turn_state{ n_turns_, 0 });
        n_turns_                   += is_new;
        batch_.push_back({ row, found->second.number, n_of[row.sequence] == 1, found->second.n_steps++ });
    }
}

status trace_writer::add(const layer_report & report) {
    if (!is_open()) {
        return {};
    }
    auto at = batch_.begin();

    std::set<std::pair<int32_t, tier_id>> asked;
    for (size_t i = 0; i < report.rows.size(); i++) {
        const batch_info::row & row   = report.rows[i];
        const auto              is_it = [&](const token & t) {
            return t.row.sequence == row.sequence && t.row.position == row.position;
        };
        at = std::find_if(at, batch_.end(), is_it);
        if (at == batch_.end()) {
            return fail(status::error("the trace '%s' cannot go on: token %zu of layer %u (sequence %d, position "
                                      "%d) is not in the batch that was announced",
                                      path().c_str(), i, uint32_t(report.routing.layer), row.sequence, row.position));
        }
        HOBBIT_TRY(add_token(report, i, *at++, asked));
    }
    return {};
}

status trace_writer::add_token(const layer_report & report, size_t row, const token & at,
                               std::set<std::pair<int32_t, tier_id>> & asked) {
    const layer_routing & routing = report.routing;
    char                  line[160];
    for (uint32_t slot = 0; slot < routing.n_used; slot++) {
        const size_t    i      = row * size_t(routing.n_used) + slot;
        const auto &    was    = report.was_resident[i];
        const precision served = report.plan.precisions[i];
        const tier_id   tier   = tier_of(served);
        const bool reads = served != precision::skip && !was[tier] && asked.insert({ routing.experts[i], tier }).second;
        const expert_id id       = { routing.layer, uint32_t(routing.experts[i]) };
        const uint64_t  bytes    = reads ? index_->expert_bytes(id, tier) : 0;
        const unsigned  resident = was[tier_id::high] ? 2 : was[tier_id::low] ? 1 : 0;
        const double    weight   = routing.weights.empty() ? double(NAN) : double(routing.weights[i]);
        const int       length =
            snprintf(line, sizeof(line), "%u,%u,%u,%u,%u,%d,%.9g,%u,%llu\n", at.turn, at.phase, at.step,
                     uint32_t(routing.layer), slot, routing.experts[i], weight, resident, (unsigned long long) bytes);
        HOBBIT_TRY(append(line, size_t(length)));
    }
    return {};
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

void layer_observer::tell(const layer_report & report) const {
    if (!call) {
        return;
    }
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
    call(&event, user_data);
}

} // namespace hobbit
