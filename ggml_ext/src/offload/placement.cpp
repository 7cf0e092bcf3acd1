// SPDX-License-Identifier: MIT
#include "offload/placement.h"

#include "plan/batch-info.h"

namespace hobbit {

static constexpr double COUNTED_HITS =
    0.5; // share of an upload's further hits that counts: background uploads bring others anyway
static constexpr double   LINK_MEAN     = 16.0; // samples that the link's mean goes back
static constexpr uint32_t DEVICE_LAYERS = 64;   // one of so many is measured
static constexpr uint32_t CPU_EXPERTS   = 1024; // one of so many that it would take longer for is measured

placement::placement(const std::vector<size_t> & kind_bytes, double upload_share, compute_mode mode) :
    kind_bytes_(kind_bytes),
    upload_share_(upload_share),
    mode_(mode),
    cpu_(kind_bytes.size()),
    device_(kind_bytes.size()) {}

bool placement::is_faster_on_cpu(const expert_work & w) const {
    const expert_work one      = { w.kind, 1, false };
    const double      one_less = std::max(0.0, cpu_.seconds(one) - device_.seconds(one));
    const double      saved    = mode_ == compute_mode::twiddler ? 0.0 : COUNTED_HITS * gain_.further_hits() * one_less;
    return cpu_.seconds(w) + saved <= upload_seconds(w.kind) + device_.seconds(w);
}

cpu_experts placement::place(const std::vector<expert_work> & work, int64_t n_tokens) {
    const bool          compares  = mode_ == compute_mode::automatic || mode_ == compute_mode::twiddler;
    const bool          cpu_all   = mode_ == compute_mode::cooperative && n_tokens <= batch_info::max_generated;
    const expert_work * tried     = nullptr;
    bool                is_hit    = false;
    bool                is_upload = false;
    cpu_experts         on_cpu;
    for (const expert_work & w : work) {
        bool is_cpus = !w.is_present && (cpu_all || (compares && is_faster_on_cpu(w)));
        if (!w.is_present && compares && !is_cpus && ++n_left_ % CPU_EXPERTS == 0) {
            is_cpus = true;
            tried   = &w;
        }
        is_hit    = is_hit || w.is_present;
        is_upload = is_upload || (!w.is_present && !is_cpus);
        on_cpu.push_back(is_cpus);
    }
    if (tried) {
        cpu_.forget(*tried);
    }
    measures_device_ = compares && is_hit && !is_upload && n_measurable_++ % DEVICE_LAYERS == 0;
    return on_cpu;
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

} // namespace hobbit
