// SPDX-License-Identifier: MIT
#include "offload/latency-means.h"

namespace hobbit {

static constexpr uint32_t MOST_COUNTED = 64; // samples that a mean goes back

double latency_means::seconds(const expert_work & w) const {
    const auto & means = kinds_[w.kind];
    const size_t own   = cell_of(w.n_rows);
    for (size_t cell = own + 1; cell-- > 0;) {
        if (means[cell].n_samples > 0) {
            return means[cell].seconds * double(size_t(1) << (own - cell));
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

} // namespace hobbit
