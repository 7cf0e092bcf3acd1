// SPDX-License-Identifier: MIT
#include "record/trace.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>

namespace hobbit {

// Replaces what would break a line.
static std::string one_line(std::string text) {
    std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, '?');
    return text;
}

static constexpr const char * MAGIC = "# route_trace v1\n";

status trace_writer::open(const std::string & path, const trace_header & header) {
    GGML_ASSERT(header.expert_bytes.size() == header.n_layers && header.n_used.size() == header.n_layers);
    turns_.clear();
    batch_.clear();
    n_turns_ = 0;
    HOBBIT_TRY(file_.open(path, "trace", MAGIC));
    const uint32_t n_used = *std::max_element(header.n_used.begin(), header.n_used.end());
    std::string    text =
        format("# model=%s arch=%s n_layer=%u n_expert=%u n_expert_used=%u\n", one_line(header.model).c_str(),
               one_line(header.architecture).c_str(), header.n_layers, header.n_experts, n_used);
    for (uint32_t layer = 0; layer < header.n_layers; layer++) {
        const uint32_t own  = header.n_used[layer];
        text               += format("# layer=%u expert_bytes=%llu dense_bytes=0", layer,
                                     (unsigned long long) header.expert_bytes[layer]);
        text               += (own < n_used ? format(" n_expert_used=%u", own) : "") + "\n";
    }
    text += "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";
    return file_.append(text.data(), text.size());
}

void trace_writer::begin_sequence(int32_t sequence) {
    turns_.erase(sequence);
}

void trace_writer::begin_batch(const std::vector<batch_info::row> & tokens) {
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

status trace_writer::add(const trace_layer & layer) {
    status result;
    auto   at = batch_.begin();
    for (size_t i = 0; i < layer.rows.size() && result.ok(); i++) {
        const batch_info::row & row   = layer.rows[i];
        const auto              is_it = [&](const token & t) {
            return t.row.sequence == row.sequence && t.row.position == row.position;
        };
        at = std::find_if(at, batch_.end(), is_it);
        if (at == batch_.end()) {
            return file_.fail(status::error("the trace '%s' cannot go on: token %zu of layer %u (sequence %d, position "
                                            "%d) is not in the batch that was announced",
                                            file_.path().c_str(), i, layer.layer, row.sequence, row.position));
        }
        result = add_token(layer, i, *at++);
    }
    return result;
}

status trace_writer::add_token(const trace_layer & layer, size_t row, const token & at) {
    char   line[160];
    status result;
    for (uint32_t slot = 0; slot < layer.n_used && result.ok(); slot++) {
        const size_t i      = row * layer.n_used + slot;
        const double weight = layer.weights.empty() ? double(NAN) : double(layer.weights[i]);
        const int    length =
            snprintf(line, sizeof(line), "%u,%u,%u,%u,%u,%d,%.9g,%u,%llu\n", at.turn, at.phase, at.step, layer.layer,
                     slot, layer.experts[i], weight, unsigned(layer.residency[i]), (unsigned long long) layer.bytes[i]);
        result = file_.append(line, size_t(length));
    }
    return result;
}

} // namespace hobbit
