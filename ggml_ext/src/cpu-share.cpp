// SPDX-License-Identifier: MIT
#include "cpu-share.h"

#include "ggml-impl.h"

#include <algorithm>

namespace hobbit {

cpu_share::cpu_share(const expert_index & index, expert_cache & cache, expert_cache & host, const expert_kinds & kinds,
                     const cost_model & costs, stats & stats) :
    index_(index), cache_(cache), host_(host), kinds_(kinds), costs_(costs), stats_(stats), rows_(index, host) {}

void cpu_share::begin_layer(const layer_routing & routing, const layer_plan & plan, inner_graph & device) {
    const uint32_t parts = index_.layer(routing.layer).parts;
    routing_             = &routing;
    plan_                = &plan;
    work_.clear();
    for (const planned_use & use : plan.uses) {
        const bool is_present = cache_.holds(use.id, use.tier, parts) && cache_.arrived(use.id, use.tier, parts);
        work_.push_back({ kinds_.of(use.id, use.tier), uint32_t(use.selections.size()), is_present });
    }
    placement_ = unshared_.count(routing.layer) > 0 ? costs_.leave_to_device(work_) : costs_.place(work_);
    began_     = { clock::now(), device.measured(), stats_.bytes_read };
    device.measure(placement_.measures_device);
    cpu_time_     = seconds(0);
    is_as_placed_ = true;
}

bool cpu_share::pin(const planned_use & use) {
    const auto & terms = index_.terms(use.tier);
    return std::all_of(terms.begin(), terms.end(), [&](uint32_t term) { return host_.n_slots(term) > 0; }) &&
           host_.acquire(use.id, use.tier);
}

void cpu_share::begin_section(const layer_section & section, uint32_t parts) {
    const auto start     = clock::now();
    const bool can_share = host_rows::can_share(section, *routing_);
    parts_               = parts;
    for (const planned_use & use : plan_->uses) {
        if (!has(use)) {
            continue;
        }
        if (can_share && pin(use)) {
            host_.request(use.id, use.tier, parts);
            pinned_.push_back(&use);
        } else {
            placement_.on_cpu[size_t(&use - plan_->uses.data())] = false;
            is_as_placed_                                        = false;
        }
    }
    if (!can_share && !is_as_placed_) {
        if (unshared_.empty()) {
            GGML_LOG_WARN("hobbit: there are experts that only the device computes: between their products this model "
                          "has operations that the CPU cannot share\n");
        }
        unshared_.insert(routing_->layer);
    }
    has_rows_ = !pinned_.empty();
    if (has_rows_) {
        rows_.begin(section, *routing_, pinned_);
        cpu_time_ += clock::now() - start;
    }
}

status cpu_share::compute_next(inner_graph & cpu) {
    const host_rows::piece next = rows_.next();
    for (size_t i = next.first; i < next.end; i++) {
        const status s = host_.wait(pinned_[i]->id, pinned_[i]->tier, parts_);
        if (!s.ok()) {
            return s;
        }
    }
    const auto   start  = clock::now();
    const status s      = rows_.compute_next(cpu);
    cpu_time_          += clock::now() - start;
    if (rows_.is_done()) {
        release();
    }
    return s;
}

status cpu_share::end_section(inner_graph & device) {
    if (!has_rows_) {
        return {};
    }
    device.measure(false); // what follows is the CPU's
    const auto   start  = clock::now();
    const status s      = rows_.copy_back(device);
    cpu_time_          += clock::now() - start;
    has_rows_           = false;
    device.measure(placement_.measures_device);
    return s;
}

void cpu_share::release() {
    for (const planned_use * use : pinned_) {
        host_.release(use->id, use->tier);
    }
    pinned_.clear();
}

void cpu_share::abandon() {
    release();
    has_rows_ = false;
}

// One of so many layers is waited for, to tell what it took; a prime, so that it is not always the same layer.
static constexpr uint64_t SAMPLED = 17;

// What went as it was placed is a sample of who was at work.
void cpu_share::end_layer(const ggml_tensor * output, inner_graph & device, inner_graph & cpu) {
    const bool can_tell = is_as_placed_ && !placement_.measures_device && stats_.bytes_read == began_.bytes_read;
    const bool is_told  = can_tell && n_told_++ % SAMPLED == 0;
    if (is_told) {
        wait_for(output);
    }
    device.measure(false);
    const seconds took       = clock::now() - began_.time;
    const bool    any_on_cpu = std::count(placement_.on_cpu.begin(), placement_.on_cpu.end(), true) > 0;
    if (any_on_cpu) {
        stats_.cpu_ns += uint64_t(cpu_time_.count() * 1e9);
    }
    if (is_as_placed_ && any_on_cpu) {
        costs_.cpu_took(work_, placement_.on_cpu, cpu_time_.count());
    }
    if (placement_.measures_device && is_as_placed_) {
        costs_.device_took(work_, placement_.on_cpu, seconds(device.measured() - began_.device).count());
    } else if (placement_.measures_device) {
        costs_.device_not_told();
    }
    learn_link();
    if (is_told) {
        costs_.layer_took(work_, placement_, took.count());
        stats_.layers_predicted++;
        stats_.predicted_ns += uint64_t(placement_.seconds * 1e9);
        stats_.measured_ns  += uint64_t(took.count() * 1e9);
    }
    bring();
    if (placement_.may_use_cpu) {
        awake_.keep(cpu.backend());
    }
}

void cpu_share::learn_link() {
    const loader::transfers now = cache_.transferred();
    if (now.bytes > link_.bytes && now.ns > link_.ns) {
        costs_.link_took(double(now.bytes - link_.bytes), double(now.ns - link_.ns) * 1e-9);
        link_ = now;
    }
}

// What the CPU has computed may be needed again: one expert comes to the device at a time, while nothing else is on its
// way there. It takes the place of another one before it is there, so that many at once would empty the pool.
void cpu_share::bring() {
    for (const planned_use & use : plan_->uses) {
        if (!has(use)) {
            continue;
        }
        stats_.selections_cpu += use.selections.size();
        cache_.bring(use.id, use.tier, index_.layer(use.id.layer).parts);
    }
}

} // namespace hobbit
