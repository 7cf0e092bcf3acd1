// SPDX-License-Identifier: MIT
#include "offload/placement.h"

#include "plan/batch-info.h"

namespace hobbit {

static constexpr uint32_t MOST_COUNTED = 64; // samples that a mean goes back

double latency_means::seconds(const expert_work & w) const {
    const auto & means = kinds_[w.kind];
    const size_t own   = cell_of(w.n_rows);
    for (size_t cell = own + 1; cell-- > 0;) {
        if (means[cell].n_samples > 0) {
            return means[cell].seconds * double(size_t(1) << (is_constant_ ? 0 : own - cell));
        }
    }
    return 0.0;
}

void latency_means::took(const std::vector<expert_work> & work, const cpu_experts & on_cpu, bool is_cpu, double all) {
    std::vector<std::pair<mean *, double>> expected;
    double                                 sum    = 0.0;
    bool                                   is_new = false;
    for (size_t i = 0; i < work.size(); i++) {
        if (on_cpu[i] == is_cpu) {
            expected.emplace_back(&at(work[i]), seconds(work[i]));
            sum    += expected.back().second;
            is_new  = is_new || expected.back().second == 0.0;
        }
    }
    for (auto & [m, seconds] : expected) {
        const double sample  = is_new ? all / double(expected.size()) : all * seconds / sum;
        m->n_samples         = std::min(m->n_samples + 1, MOST_COUNTED);
        m->seconds          += (sample - m->seconds) / m->n_samples;
    }
}

static constexpr double COUNTED_HITS =
    0.15; // share of an upload's further hits that counts: background uploads bring others anyway
static constexpr double   SHARING       = 1.1;  // CPU and link together take so much longer than their experts
static constexpr double   LINK_MEAN     = 16.0; // samples that the link's mean goes back
static constexpr uint32_t DEVICE_LAYERS = 64;   // measures every n-th layer
static constexpr uint32_t CPU_EXPERTS   = 1024; // gives the CPU every n-th expert that it would take longer for

placement::placement(const std::vector<size_t> & kind_bytes, double upload_share, compute_mode mode) :
    kind_bytes_(kind_bytes),
    upload_share_(upload_share),
    mode_(mode),
    cpu_(kind_bytes.size()),
    cpu_beside_(kind_bytes.size()),
    device_(kind_bytes.size(), mode == compute_mode::twiddler) {}

void placement::cpu_took(const std::vector<expert_work> & work, const cpu_experts & on_cpu, double seconds) {
    bool is_beside = false;
    for (size_t i = 0; i < work.size(); i++) {
        is_beside = is_beside || (!work[i].is_present && !on_cpu[i]);
    }
    if (is_beside) {
        cpu_beside_.took(work, on_cpu, true, seconds);
    }
    if (!is_beside || tries_cpu_) { // else it may never be measured alone
        cpu_.took(work, on_cpu, true, seconds);
    }
}

double placement::seconds_beside(const expert_work & w) const {
    const double beside = cpu_beside_.seconds(w);
    return beside > 0.0 ? beside : cpu_.seconds(w);
}

double placement::saved_by_upload(const expert_work & w) const {
    const expert_work one      = { w.kind, 1, false };
    const double      one_less = std::max(0.0, cpu_.seconds(one) - device_.seconds(one));
    return mode_ == compute_mode::twiddler ? 0.0 : COUNTED_HITS * gain_.further_hits() * one_less;
}

cpu_experts placement::faster_on_cpu(const std::vector<expert_work> & work, bool is_ahead) const {
    double launch = 0.0;
    for (const expert_work & w : work) {
        launch += is_ahead && w.is_present && mode_ == compute_mode::automatic ? device_.seconds(w) : 0.0;
    }
    double      all_on_cpu = 0.0;
    double      all_upload = launch;
    double      cpu        = 0.0; // seconds of the layer's experts so far
    double      link       = 0.0;
    cpu_experts on_cpu;
    for (const expert_work & w : work) {
        const double on_cpu_at    = cpu + (link > 0.0 ? seconds_beside(w) : cpu_.seconds(w));
        const double on_device_at = launch + link + upload_seconds(w.kind) + device_.seconds(w);
        const bool   is_cpus      = !w.is_present && on_cpu_at + saved_by_upload(w) <= on_device_at;
        on_cpu.push_back(is_cpus);
        if (w.is_present || mode_ == compute_mode::twiddler) { // twiddler decides each expert by itself
            continue;
        }
        all_on_cpu             += cpu_.seconds(w) + (is_cpus ? 0.0 : saved_by_upload(w));
        all_upload             += upload_seconds(w.kind) - (is_cpus ? saved_by_upload(w) : 0.0);
        (is_cpus ? cpu : link) += is_cpus ? seconds_beside(w) : upload_seconds(w.kind);
    }
    const bool is_shared = cpu > 0.0 && link > 0.0;
    if (is_shared && SHARING * std::max(cpu, launch + link) >= std::min(all_on_cpu, all_upload)) {
        for (size_t i = 0; i < work.size(); i++) {
            on_cpu[i] = !work[i].is_present && all_on_cpu <= all_upload;
        }
    }
    return on_cpu;
}

cpu_experts placement::place(const std::vector<expert_work> & work, int64_t n_tokens, bool is_ahead) {
    const bool compares  = mode_ == compute_mode::automatic || mode_ == compute_mode::twiddler;
    const bool cpu_all   = mode_ == compute_mode::cooperative && n_tokens <= batch_info::max_generated;
    bool       is_hit    = false;
    bool       is_upload = false;
    tries_cpu_           = false;
    cpu_experts on_cpu   = compares ? faster_on_cpu(work, is_ahead) : cpu_experts(work.size(), false);
    for (size_t i = 0; i < work.size(); i++) {
        if (work[i].is_present) {
            is_hit = true;
            continue;
        }
        if (compares && !on_cpu[i] && ++n_left_ % CPU_EXPERTS == 0) {
            on_cpu[i]  = true;
            tries_cpu_ = true;
            cpu_.forget(work[i]);
            cpu_beside_.forget(work[i]);
        }
        on_cpu[i] = on_cpu[i] || cpu_all;
        is_upload = is_upload || !on_cpu[i];
    }
    measures_device_ = compares && is_hit && !is_upload && n_measurable_++ % DEVICE_LAYERS == 0;
    return on_cpu;
}

void placement::link_took(double bytes, double seconds) {
    const double sample  = seconds / bytes;
    seconds_per_byte_   += seconds_per_byte_ > 0.0 ? (sample - seconds_per_byte_) / LINK_MEAN : sample;
}

std::vector<hobbit_latency> placement::latencies() const {
    std::vector<hobbit_latency> found;
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
