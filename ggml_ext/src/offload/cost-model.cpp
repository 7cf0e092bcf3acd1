// SPDX-License-Identifier: MIT
#include "offload/cost-model.h"

#include <algorithm>
#include <numeric>

namespace hobbit {

static constexpr double AS_EXPECTED = 2.0; // a trial that differs by less confirms what is known

cost_model::cost_model(const std::vector<kind_seed> & kinds, double transfer_per_byte, compute_mode mode) :
    link_(0.0, transfer_per_byte), mode_(mode) {
    slowdown_.fill(1.0);
    for (const kind_seed & k : kinds) {
        kinds_.push_back({ k.bytes, k.down, { k.cpu_start, k.cpu_per_token }, { k.device_start, k.device_per_token } });
    }
}

std::vector<expert_costs> cost_model::costs(const std::vector<expert_work> & work) const {
    return costs_of(sum(work, [](size_t) { return 1.0; }));
}

// To the device all experts of a kind have as many tokens as these have on average: it takes so long for all of them.
std::vector<expert_costs> cost_model::costs_of(const works & all) const {
    std::vector<expert_costs> costs;
    for (size_t i = 0; i < kinds_.size(); i++) {
        const kind_state & k      = kinds_[i];
        const double       tokens = all[i].jobs > 0.0 ? all[i].units / all[i].jobs : 1.0;
        costs.push_back({ k.cpu.per_job(), k.cpu.per_unit(), k.device.seconds({ 1.0, tokens }),
                          link_.seconds({ 0.0, double(k.bytes) }), k.down });
    }
    return costs;
}

// Who works at once, beside the device. With a split expert they wait for each other.
static constexpr size_t CPU   = 1;
static constexpr size_t LINK  = 2;
static constexpr size_t SPLIT = 4;

static size_t combination(const std::vector<expert_work> & work, const placed_experts & by) {
    size_t who = 0;
    for (size_t i = 0; i < work.size(); i++) {
        switch (by[i]) {
            case computed_by::cpu:    who |= CPU; break;
            case computed_by::split:  who |= CPU | LINK | SPLIT; break;
            case computed_by::device: who |= work[i].is_present ? 0 : LINK; break;
        }
    }
    return who;
}

cost_model::placement cost_model::place(const std::vector<expert_work> & work, bool may_split, double further_misses) {
    placement p;
    if (chooses()) {
        p.by = place_alone_or_together(work, may_split, further_misses);
        try_others(work, p.by);
        p.may_use_cpu = combination(work, p.by) == LINK;
    } else {
        for (const expert_work & w : work) {
            const bool is_cpus = mode_ == compute_mode::cooperative && !w.is_present;
            p.by.push_back(is_cpus ? computed_by::cpu : computed_by::device);
        }
    }
    finish(work, p);
    return p;
}

cost_model::placement cost_model::leave_to_device(const std::vector<expert_work> & work) {
    placement p;
    p.by.assign(work.size(), computed_by::device);
    finish(work, p);
    return p;
}

//
// combination
//

static constexpr double LEARNT       = 0.4;  // of a sample
static constexpr double MAX_SLOWDOWN = 4.0;  // of a sample
static constexpr double FORGOT       = 0.05; // of the others meanwhile, so that they are tried again

// Beside a copy the device's time is not known: one behind RPC may wait for it.
void cost_model::finish(const std::vector<expert_work> & work, placement & p) {
    const bool   has_device = std::find(p.by.begin(), p.by.end(), computed_by::device) != p.by.end();
    const size_t who        = combination(work, p.by);
    p.measures_device       = has_device && !(who & LINK) && device_trial_.is_due();
    p.seconds               = seconds(work, p.by);
    n_placed_++;
    // a combination that has not been at work for a while is measured at once: it may have been tried again in vain
    p.measures_layer = !p.measures_device && n_placed_ - measured_at_[who] >= max_unmeasured;
}

double cost_model::on_device(const expert_work & w, computed_by by) const {
    return by == computed_by::device ? 1.0 : by == computed_by::split ? kinds_[w.kind].down : 0.0;
}

double cost_model::seconds(const std::vector<expert_work> & work, const placed_experts & by) const {
    const works devices = sum(work, [&](size_t i) { return on_device(work[i], by[i]); });
    return layer_seconds(costs_of(devices), work, by) * slowdown_[combination(work, by)];
}

// The best for three that do not hinder each other, with and without an expert that is split, or what needs only two
// of them. A further miss counts as a transfer: an expert that is used n times, and bypasses the device each time, is
// missed (n - 1) / n times more for each, and is worth bringing where n times the CPU's time is longer than a transfer.
placed_experts cost_model::place_alone_or_together(const std::vector<expert_work> & work, bool may_split,
                                                   double further_misses) const {
    const placed_experts none(work.size(), computed_by::device);
    placed_experts       all;
    for (const expert_work & w : work) {
        all.push_back(w.is_present ? computed_by::device : computed_by::cpu);
    }
    if (all == none) {
        return none; // nothing is missing
    }
    std::vector<expert_costs> each = costs(work);
    for (expert_costs & c : each) {
        c.bypass = further_misses * c.transfer;
    }
    const auto     cost = [&](const placed_experts & by) { return seconds(work, by) + bypass_seconds(each, work, by); };
    placed_experts best = place_experts(each, work, false);
    for (const auto & other : { may_split ? place_experts(each, work, true) : best, none, all }) {
        best = cost(other) < cost(best) ? other : best;
    }
    return best;
}

void cost_model::layer_took(const std::vector<expert_work> & work, const placement & p, double seconds) {
    const size_t own   = combination(work, p.by);
    measured_at_[own]  = n_placed_;
    const double alone = p.seconds / slowdown_[own];
    const double ratio = std::min(std::max(seconds / alone, 1 / MAX_SLOWDOWN), MAX_SLOWDOWN);
    for (size_t i = 0; i < slowdown_.size(); i++) {
        slowdown_[i] += i == own ? LEARNT * (ratio - slowdown_[i]) : FORGOT * (1.0 - slowdown_[i]);
    }
}

//
// trials
//

bool cost_model::trial::is_due() {
    return ++waited >= wait;
}

void cost_model::trial::end(double expected, double measured) {
    const bool     as_expected = measured < AS_EXPECTED * expected && expected < AS_EXPECTED * measured;
    const uint32_t sooner      = std::max(wait / back, 1u);
    put_off();
    wait = as_expected ? wait : sooner;
}

void cost_model::trial::put_off() {
    wait   = std::min(2 * wait, most);
    waited = 0;
}

// Each kind that the CPU has none of, and the link where it brings nothing: one expert, of those missing the one with
// the fewest tokens.
void cost_model::try_others(const std::vector<expert_work> & work, placed_experts & by) {
    std::vector<const expert_work *> least(kinds_.size());
    std::vector<bool>                is_tried(kinds_.size(), true);
    const expert_work *              least_brought = nullptr;
    bool                             brings        = false;
    for (size_t i = 0; i < work.size(); i++) {
        const expert_work & w = work[i];
        if (w.is_present) {
            continue;
        }
        least[w.kind]    = !least[w.kind] || w.n_tokens < least[w.kind]->n_tokens ? &w : least[w.kind];
        is_tried[w.kind] = is_tried[w.kind] && by[i] == computed_by::device;
        brings           = brings || by[i] != computed_by::cpu;
        least_brought    = !least_brought || w.n_tokens < least_brought->n_tokens ? &w : least_brought;
    }
    for (size_t k = 0; k < kinds_.size(); k++) {
        if (least[k] && is_tried[k] && kinds_[k].cpu_trial.is_due()) {
            by[size_t(least[k] - work.data())] = computed_by::cpu;
            return; // one at a time
        }
    }
    if (least_brought && !brings && link_trial_.is_due()) {
        by[size_t(least_brought - work.data())] = computed_by::device;
    }
}

//
// corrections
//

cost_model::works cost_model::sum(const std::vector<expert_work> & work, const portion & counted) const {
    works sums(kinds_.size());
    for (size_t i = 0; i < work.size(); i++) {
        const double jobs         = counted(i);
        sums[work[i].kind].jobs  += jobs;
        sums[work[i].kind].units += jobs * work[i].n_tokens;
    }
    return sums;
}

std::vector<latency_estimate::part> cost_model::parts(const works & sums, latency_estimate kind_state::* whose) {
    std::vector<latency_estimate::part> parts;
    for (size_t k = 0; k < kinds_.size(); k++) {
        if (sums[k].jobs > 0.0) {
            parts.push_back({ &(kinds_[k].*whose), sums[k] });
        }
    }
    return parts;
}

static double expected(const std::vector<latency_estimate::part> & done) {
    return std::accumulate(done.begin(), done.end(), 0.0, [](double sum, const latency_estimate::part & part) {
        return sum + part.estimate->seconds(part.done);
    });
}

void cost_model::cpu_took(const std::vector<expert_work> & work, const placed_experts & by, double seconds) {
    const works sums = sum(work, [&](size_t i) { return 1.0 - on_device(work[i], by[i]); });
    const auto  done = parts(sums, &kind_state::cpu);
    for (size_t k = 0; k < kinds_.size(); k++) {
        if (sums[k].jobs > 0.0) {
            kinds_[k].cpu_trial.end(expected(done), seconds);
        }
    }
    latency_estimate::correct(done, seconds);
}

void cost_model::device_took(const std::vector<expert_work> & work, const placed_experts & by, double seconds) {
    const auto done = parts(sum(work, [&](size_t i) { return on_device(work[i], by[i]); }), &kind_state::device);
    device_trial_.end(expected(done), seconds);
    latency_estimate::correct(done, seconds);
}

void cost_model::link_took(double bytes, double seconds) {
    const latency_estimate::work done = { 0.0, bytes };
    link_trial_.end(link_.seconds(done), seconds);
    latency_estimate::correct({ { &link_, done } }, seconds);
}

} // namespace hobbit
