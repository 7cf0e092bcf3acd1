// SPDX-License-Identifier: MIT
#include "offload/latency-means.h"

#include <algorithm>

namespace hobbit {

static constexpr uint32_t MOST_COUNTED = 16; // samples that a mean goes back

void latency_means::mean::add(double sample) {
    n_samples  = age >= max_age ? 1 : std::min(n_samples + 1, MOST_COUNTED);
    seconds   += (sample - seconds) / n_samples;
    age        = 0;
}

size_t latency_means::cell_of(uint32_t n_rows) {
    size_t cell = 0;
    for (; n_rows > 1 && cell + 1 < n_cells; n_rows /= 2) {
        cell++;
    }
    return cell;
}

double latency_means::seconds(const job & j) const {
    const auto & means = kinds_[j.kind];
    const size_t own   = cell_of(j.n_rows);
    for (size_t cell = own + 1; cell-- > 0;) {
        if (means[cell].n_samples > 0) {
            return means[cell].seconds * double(size_t(1) << (own - cell));
        }
    }
    const auto known = std::find_if(means.begin(), means.end(), [](const mean & m) { return m.n_samples > 0; });
    return known == means.end() ? 0.0 : known->seconds;
}

void latency_means::took(const std::vector<job> & jobs, double seconds_of_all) {
    std::vector<double> expected;
    double              sum     = 0.0;
    size_t              n_known = 0;
    for (const job & j : jobs) {
        expected.push_back(seconds(j));
        sum     += expected.back();
        n_known += expected.back() > 0.0;
    }
    const double others  = n_known > 0 ? sum / double(n_known) : 1.0; // of a kind without a sample
    sum                 += others * double(jobs.size() - n_known);
    for (size_t i = 0; i < jobs.size(); i++) {
        const auto is_same = [&](const job & j) { return &at(j) == &at(jobs[i]); };
        const auto first   = jobs.begin() + ptrdiff_t(i);
        if (std::none_of(jobs.begin(), first, is_same)) {
            at(jobs[i]).add((expected[i] > 0.0 ? expected[i] : others) / sum * seconds_of_all);
        }
    }
}

} // namespace hobbit
