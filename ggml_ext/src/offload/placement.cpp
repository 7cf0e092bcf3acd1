// SPDX-License-Identifier: MIT
#include "offload/placement.h"

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
    double handed = 0.0; // and of what the CPU hands over
    double later  = 0.0; // for what bypasses the device

    double cpu_side() const { return cpu + handed; }
    double device_side() const { return std::max(device, link + last); }
    double seconds() const { return std::max(cpu_side(), device_side()); }
    double cost() const { return seconds() + later; }

    void add_bypassing(const expert_costs & costs, double cpu_seconds, size_t n) {
        cpu   += cpu_seconds;
        later += costs.bypass * double(n);
    }

    void add_brought(const expert_costs & costs, size_t n) {
        device += costs.device * double(n);
        link   += costs.transfer * double(n);
        last    = n > 0 ? std::max(last, costs.device) : last;
    }

    void add_split(const expert_costs & costs, uint32_t n_tokens) {
        const double rest  = costs.device * costs.down;
        device            += rest;
        link              += costs.transfer * costs.down;
        last               = std::max(last, rest);
        handed             = std::max(handed, rest);
        add_bypassing(costs, costs.cpu(n_tokens) * (1.0 - costs.down), 1);
    }
};

static layer_totals total(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                          const placed_experts & placed) {
    layer_totals totals;
    for (size_t i = 0; i < work.size(); i++) {
        const expert_costs & c = costs[work[i].kind];
        if (placed[i] == computed_by::cpu) {
            totals.add_bypassing(c, c.cpu(work[i].n_tokens), 1);
        } else if (placed[i] == computed_by::split) {
            totals.add_split(c, work[i].n_tokens);
        } else if (work[i].is_present) {
            totals.device += c.device;
        } else {
            totals.add_brought(c, 1);
        }
    }
    return totals;
}

double layer_seconds(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                     const placed_experts & placed) {
    return total(costs, work, placed).seconds();
}

double bypass_seconds(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                      const placed_experts & placed) {
    return total(costs, work, placed).later;
}

// The missing experts of a kind, those with the fewest tokens first.
struct missing_kind {
    const expert_costs *  costs;
    std::vector<size_t>   experts;
    std::vector<uint32_t> n_tokens; // [expert]
    std::vector<double>   cpu;      // [n] what the first n take there
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
            group.n_tokens.push_back(work[i].n_tokens);
            group.cpu.push_back(group.cpu.back() + group.costs->cpu(work[i].n_tokens));
        }
        groups.push_back(std::move(group));
    }
    return groups;
}

// How many of each kind the CPU has, and of which kind the next one is split.
struct kind_counts {
    static constexpr size_t none = SIZE_MAX;

    std::vector<size_t> on_cpu;       // [kind]
    size_t              split = none; // kind
};

// The first number for which it holds, as for all after it, or n.
template <typename F>
static size_t first_of(size_t n, const F & holds) {
    size_t low  = 0; // below it, it does not
    size_t high = n;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (holds(middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// The best: all numbers of all kinds but the last one are tried. With every further expert of that one the CPU takes
// longer and the device does not. From where they meet the first number is the best. Before, the device's time falls
// ever more slowly while what bypasses it adds up, so that there is one lowest point.
class best_counts {
  public:
    explicit best_counts(const std::vector<missing_kind> & kinds) : kinds_(kinds) {
        tried_.on_cpu.resize(kinds.size());
    }

    const kind_counts & find(const layer_totals & present, bool may_split) {
        try_from(0, present);
        for (size_t k = 0; k < kinds_.size() && may_split; k++) {
            if (kinds_[k].costs->can_split()) {
                tried_.split = k;
                try_from(0, present);
            }
        }
        return best_;
    }

  private:
    // Of how many experts of a kind the CPU may have a number: those that are not split.
    size_t n_whole(size_t k) const { return kinds_[k].experts.size() - (k == tried_.split); }

    layer_totals with(layer_totals totals, size_t k, size_t n) const {
        const missing_kind & kind = kinds_[k];
        totals.add_bypassing(*kind.costs, kind.cpu[n], n);
        totals.add_brought(*kind.costs, n_whole(k) - n);
        if (k == tried_.split) {
            totals.add_split(*kind.costs, kind.n_tokens[n]);
        }
        return totals;
    }

    void keep_if_better(const layer_totals & totals) {
        if (totals.cost() < cost_) {
            cost_ = totals.cost();
            best_ = tried_;
        }
    }

    void try_from(size_t k, const layer_totals & totals) {
        if (k == kinds_.size()) {
            keep_if_better(totals);
            return;
        }
        if (k + 1 == kinds_.size()) {
            try_last(totals);
            return;
        }
        for (size_t n = 0; n <= n_whole(k) && totals.cpu + totals.later + kinds_[k].cpu[n] < cost_; n++) {
            tried_.on_cpu[k] = n;
            try_from(k + 1, with(totals, k, n));
        }
    }

    void try_last(const layer_totals & totals) {
        const size_t k    = kinds_.size() - 1;
        const auto   at   = [&](size_t n) { return with(totals, k, n); };
        const size_t meet = first_of(n_whole(k), [&](size_t n) { return at(n).cpu_side() >= at(n).device_side(); });
        const size_t turn =
            first_of(std::max<size_t>(meet, 1) - 1, [&](size_t n) { return at(n + 1).cost() >= at(n).cost(); });
        for (const size_t n : { turn, meet }) {
            tried_.on_cpu[k] = n;
            keep_if_better(at(n));
        }
    }

    const std::vector<missing_kind> & kinds_;
    kind_counts                       tried_;
    kind_counts                       best_;
    double                            cost_ = std::numeric_limits<double>::infinity();
};

placed_experts place_experts(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                             bool may_split) {
    layer_totals present;
    for (const expert_work & w : work) {
        present.device += w.is_present ? costs[w.kind].device : 0.0;
    }
    const std::vector<missing_kind> kinds  = group_missing(costs, work);
    const kind_counts               counts = best_counts(kinds).find(present, may_split);
    placed_experts                  placed(work.size(), computed_by::device);
    for (size_t k = 0; k < kinds.size(); k++) {
        const size_t n = counts.on_cpu[k];
        for (size_t i = 0; i < n; i++) {
            placed[kinds[k].experts[i]] = computed_by::cpu;
        }
        if (k == counts.split) {
            placed[kinds[k].experts[n]] = computed_by::split;
        }
    }
    return placed;
}

} // namespace hobbit
