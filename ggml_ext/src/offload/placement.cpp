// SPDX-License-Identifier: MIT
#include "offload/placement.h"

#include "plan/batch-info.h"

#include <algorithm>

namespace hobbit {

static constexpr double   COUNTED_HITS  = 0.5;  // of the further hits of an upload
static constexpr double   LINK_MEAN     = 16.0; // samples that the link's mean goes back
static constexpr uint32_t DEVICE_LAYERS = 64;   // one of so many is measured

placement::placement(const std::vector<size_t> & kind_bytes, double upload_share, compute_mode mode) :
    kind_bytes_(kind_bytes),
    upload_share_(upload_share),
    mode_(mode),
    cpu_(kind_bytes.size()),
    device_(kind_bytes.size()) {}

// By an upload, for later tokens.
double placement::saved_seconds(const expert_work & w) const {
    const latency_means::job one = { w.kind, 1 };
    return mode_ == compute_mode::twiddler
               ? 0.0
               : COUNTED_HITS * gain_.further_hits() * std::max(0.0, cpu_.seconds(one) - device_.seconds(one));
}

bool placement::is_faster_on_cpu(const expert_work & w) const {
    const latency_means::job all = { w.kind, w.n_rows };
    return cpu_.seconds(all) + saved_seconds(w) <= upload_seconds(w.kind) + device_.seconds(all);
}

cpu_experts placement::place(const std::vector<expert_work> & work, int64_t n_tokens) {
    const bool  cpu_has_all  = mode_ == compute_mode::cooperative && n_tokens <= batch_info::max_generated;
    bool        is_uploading = false;
    bool        is_trying    = false; // one at a time
    cpu_experts on_cpu;
    for (const expert_work & w : work) {
        bool is_cpus = !w.is_present && cpu_has_all;
        if (!w.is_present && compares()) {
            is_cpus = is_faster_on_cpu(w);
            if (!is_cpus && cpu_.pass_over({ w.kind, w.n_rows }) && !is_trying) {
                is_cpus = is_trying = true;
            }
        }
        is_uploading = is_uploading || (!w.is_present && !is_cpus);
        on_cpu.push_back(is_cpus);
    }
    const bool has_present = std::any_of(work.begin(), work.end(), [](const expert_work & w) { return w.is_present; });
    measures_device_       = compares() && has_present && !is_uploading;
    measures_device_       = measures_device_ && n_placed_++ % DEVICE_LAYERS == 0;
    return on_cpu;
}

static std::vector<latency_means::job> jobs_of(const std::vector<expert_work> & work, const cpu_experts & on_cpu,
                                               bool cpu) {
    std::vector<latency_means::job> jobs;
    for (size_t i = 0; i < work.size(); i++) {
        if (on_cpu[i] == cpu) {
            jobs.push_back({ work[i].kind, work[i].n_rows });
        }
    }
    return jobs;
}

void placement::cpu_took(const std::vector<expert_work> & work, const cpu_experts & on_cpu, double seconds) {
    cpu_.took(jobs_of(work, on_cpu, true), seconds);
}

void placement::device_took(const std::vector<expert_work> & work, const cpu_experts & on_cpu, double seconds) {
    device_.took(jobs_of(work, on_cpu, false), seconds);
}

void placement::link_took(double bytes, double seconds) {
    const double sample  = seconds / bytes;
    seconds_per_byte_   += seconds_per_byte_ > 0.0 ? (sample - seconds_per_byte_) / LINK_MEAN : sample;
}

std::vector<placement::latency> placement::latencies() const {
    std::vector<latency> found;
    for (uint32_t kind = 0; kind < kind_bytes_.size(); kind++) {
        for (size_t cell = 0; cell < latency_means::n_cells; cell++) {
            const double cpu    = cpu_.mean_seconds(kind, cell);
            const double device = device_.mean_seconds(kind, cell);
            if (cpu > 0.0 || device > 0.0) {
                found.push_back({ kind_bytes_[kind], 1u << cell, cpu, device, upload_seconds(kind) });
            }
        }
    }
    return found;
}

void placement::pass(double seconds) {
    credit_ = std::min(0.0, credit_ + upload_share_ * seconds);
}

} // namespace hobbit
