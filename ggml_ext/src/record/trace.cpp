// SPDX-License-Identifier: MIT
#include "record/trace.h"

#include "ggml.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace hobbit {

static constexpr size_t BUFFER_SIZE = 1 << 20;

// Replaces what would break a line.
static std::string one_line(std::string text) {
    std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, '?');
    return text;
}

static constexpr const char * MAGIC = "# route_trace v1\n";

// Returns true if the file exists and is no trace, so that writing would destroy other data.
static bool is_other_file(const std::string & path) {
    std::error_code ignored;
    if (!std::filesystem::is_regular_file(path, ignored) || std::filesystem::file_size(path, ignored) == 0) {
        return false;
    }
    std::ifstream file(path, std::ios::binary);
    std::string   begin(strlen(MAGIC), '\0');
    file.read(&begin[0], std::streamsize(begin.size()));
    return begin != MAGIC;
}

trace_writer::~trace_writer() {
    close();
}

status trace_writer::open(const std::string & path, const trace_header & header) {
    GGML_ASSERT(!is_open() && header.expert_bytes.size() == header.n_layers);
    path_  = path;
    error_ = {};
    turns_.clear();
    batch_.clear();
    n_turns_ = 0;
    if (is_other_file(path)) {
        return status::error("'%s' exists and is not a trace: choose another file for the trace, or remove it",
                             path.c_str());
    }
    file_ = fopen(path.c_str(), "w");
    if (!file_) {
        return status::error("the trace '%s' cannot be written: %s; choose another file", path.c_str(),
                             strerror(errno));
    }
    buffer_  = MAGIC;
    buffer_ += format("# model=%s arch=%s n_layer=%u n_expert=%u n_expert_used=%u\n", one_line(header.model).c_str(),
                      one_line(header.architecture).c_str(), header.n_layers, header.n_experts, header.n_used);
    for (uint32_t layer = 0; layer < header.n_layers; layer++) {
        buffer_ += format("# layer=%u expert_bytes=%llu dense_bytes=0\n", layer,
                          (unsigned long long) header.expert_bytes[layer]);
    }
    buffer_ += "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n";
    return {};
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
    GGML_ASSERT(is_open());
    auto at = batch_.begin();
    for (size_t i = 0; i < layer.rows.size() && error_.ok(); i++) {
        const batch_info::row & row   = layer.rows[i];
        const auto              is_it = [&](const token & t) {
            return t.row.sequence == row.sequence && t.row.position == row.position;
        };
        at = std::find_if(at, batch_.end(), is_it);
        if (at == batch_.end()) {
            error_ = status::error("the trace '%s' cannot go on: token %zu of layer %u (sequence %d, position %d) "
                                   "is not in the batch that was announced",
                                   path_.c_str(), i, layer.layer, row.sequence, row.position);
        } else {
            add_token(layer, i, *at++);
        }
    }
    if (error_.ok() && buffer_.size() >= BUFFER_SIZE) {
        write_buffer();
    }
    return error_;
}

void trace_writer::add_token(const trace_layer & layer, size_t row, const token & at) {
    char line[160];
    for (uint32_t slot = 0; slot < layer.n_used; slot++) {
        const size_t i      = row * layer.n_used + slot;
        const double weight = layer.weights.empty() ? double(NAN) : double(layer.weights[i]);
        const int    length =
            snprintf(line, sizeof(line), "%u,%u,%u,%u,%u,%d,%.9g,%u,%llu\n", at.turn, at.phase, at.step, layer.layer,
                     slot, layer.experts[i], weight, unsigned(layer.residency[i]), (unsigned long long) layer.bytes[i]);
        buffer_.append(line, size_t(length));
    }
}

status trace_writer::write_buffer() {
    errno = 0;
    if (fwrite(buffer_.data(), 1, buffer_.size(), file_) != buffer_.size()) {
        fail(errno);
    }
    buffer_.clear();
    return error_;
}

status trace_writer::fail(int error) {
    if (error_.ok()) {
        error_ = status::error("the trace '%s' cannot be written: %s; free some space or choose another file",
                               path_.c_str(), strerror(error ? error : EIO));
    }
    return error_;
}

status trace_writer::close() {
    if (!is_open()) {
        return {};
    }
    if (error_.ok()) {
        write_buffer();
    }
    errno = 0;
    if (fclose(file_) != 0) {
        fail(errno);
    }
    file_ = nullptr;
    std::error_code ignored;
    if (!error_.ok() && std::filesystem::is_regular_file(path_, ignored)) {
        std::filesystem::remove(path_, ignored); // a device like /dev/full stays
    }
    return error_;
}

} // namespace hobbit
