// SPDX-License-Identifier: MIT
#include "placement.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>

namespace hobbit {

// Of a layer, or of some of its experts.
struct layer_totals {
    double cpu    = 0.0;
    double device = 0.0;
    double link   = 0.0;
    double last   = 0.0; // the longest device time of what the link brings

    double device_side() const { return std::max(device, link + last); }
    double seconds() const { return std::max(cpu, device_side()); }

    void add_brought(const expert_costs & costs, size_t n) {
        device += costs.device * double(n);
        link   += costs.transfer * double(n);
        last    = n > 0 ? std::max(last, costs.device) : last;
    }
};

double layer_seconds(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                     const std::vector<bool> & on_cpu) {
    layer_totals totals;
    for (size_t i = 0; i < work.size(); i++) {
        const expert_costs & c = costs[work[i].kind];
        if (on_cpu[i]) {
            totals.cpu += c.cpu(work[i].n_tokens);
        } else if (work[i].is_present) {
            totals.device += c.device;
        } else {
            totals.add_brought(c, 1);
        }
    }
    return totals.seconds();
}

// The missing experts of a kind, those with the fewest tokens first.
struct missing_kind {
    const expert_costs * costs;
    std::vector<size_t>  experts;
    std::vector<double>  cpu; // [n] what the first n take there
};

static std::vector<missing_kind> group_missing(const std::vector<expert_costs> & costs,
                                               const std::vector<expert_work> &  work) {
    std::map<uint32_t, missing_kind> kinds;
    for (size_t i = 0; i < work.size(); i++) {
        if (!work[i].is_present) {
            kinds[work[i].kind].experts.push_back(i);
        }
    }
    std::vector<missing_kind> groups;
    for (auto & [kind, group] : kinds) {
        const auto by_tokens = [&](size_t a, size_t b) { return work[a].n_tokens < work[b].n_tokens; };
        std::stable_sort(group.experts.begin(), group.experts.end(), by_tokens);
        group.costs = &costs[kind];
        group.cpu   = { 0.0 };
        for (const size_t i : group.experts) {
            group.cpu.push_back(group.cpu.back() + group.costs->cpu(work[i].n_tokens));
        }
        groups.push_back(std::move(group));
    }
    return groups;
}

// How many of each kind the CPU has: all numbers of all kinds but the last one are tried. With every further expert of
// that one the CPU takes longer and the device does not, so that the best number is where they meet.
class best_counts {
  public:
    explicit best_counts(const std::vector<missing_kind> & kinds) : kinds_(kinds), tried_(kinds.size()) {}

    const std::vector<size_t> & find(const layer_totals & present) {
        try_from(0, present);
        return best_;
    }

  private:
    static layer_totals with(layer_totals totals, const missing_kind & kind, size_t n) {
        totals.cpu += kind.cpu[n];
        totals.add_brought(*kind.costs, kind.experts.size() - n);
        return totals;
    }

    void keep_if_better(const layer_totals & totals) {
        if (totals.seconds() < seconds_) {
            seconds_ = totals.seconds();
            best_    = tried_;
        }
    }

    void try_from(size_t k, const layer_totals & totals) {
        if (k == kinds_.size()) {
            keep_if_better(totals);
            return;
        }
        if (k + 1 == kinds_.size()) {
            try_last(kinds_[k], totals);
            return;
        }
        for (size_t n = 0; n < kinds_[k].cpu.size() && totals.cpu + kinds_[k].cpu[n] < seconds_; n++) {
            tried_[k] = n;
            try_from(k + 1, with(totals, kinds_[k], n));
        }
    }

    void try_last(const missing_kind & kind, const layer_totals & totals) {
        size_t low  = 0; // below it the device takes longer
        size_t high = kind.experts.size();
        while (low < high) {
            const size_t       middle              = (low + high) / 2;
            const layer_totals t                   = with(totals, kind, middle);
            (t.cpu < t.device_side() ? low : high) = t.cpu < t.device_side() ? middle + 1 : middle;
        }
        for (const size_t n : { low, low - 1 }) {
            if (n <= kind.experts.size()) { // low - 1 may not be there
                tried_.back() = n;
                keep_if_better(with(totals, kind, n));
            }
        }
    }

    const std::vector<missing_kind> & kinds_;
    std::vector<size_t>               tried_; // [kind]
    std::vector<size_t>               best_;  // [kind]
    double                            seconds_ = std::numeric_limits<double>::infinity();
};

std::vector<bool> place_experts(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work) {
    layer_totals present;
    for (const expert_work & w : work) {
        present.device += w.is_present ? costs[w.kind].device : 0.0;
    }
    const std::vector<missing_kind> kinds  = group_missing(costs, work);
    const std::vector<size_t>       counts = best_counts(kinds).find(present);
    std::vector<bool>               on_cpu(work.size());
    for (size_t k = 0; k < kinds.size(); k++) {
        for (size_t i = 0; i < counts[k]; i++) {
            on_cpu[kinds[k].experts[i]] = true;
        }
    }
    return on_cpu;
}

} // namespace hobbit
