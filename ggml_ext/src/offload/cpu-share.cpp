// SPDX-License-Identifier: MIT
#include "offload/cpu-share.h"

#include "ggml-impl.h"

#include <algorithm>

namespace hobbit {

static std::vector<size_t> bytes_of(const expert_shapes & kinds) {
    std::vector<size_t> bytes;
    for (const expert_shape & kind : kinds.all()) {
        bytes.push_back(kind.bytes());
    }
    return bytes;
}

cpu_share::cpu_share(const expert_index & index, expert_cache & cache, expert_cache & host, const expert_shapes & kinds,
                     double upload_share, compute_mode mode, stats & stats) :
    index_(index),
    cache_(cache),
    host_(host),
    kinds_(kinds),
    stats_(stats),
    placement_(bytes_of(kinds), upload_share, mode),
    rows_(index, host),
    passed_(clock::now()) {
    cache_.set_replacement_listener([this](const expert_term & newcomer, const expert_term & victim) {
        placement_.gain().replaced(newcomer, victim);
    });
}

cpu_share::~cpu_share() {
    cache_.set_replacement_listener(nullptr);
}

status cpu_share::begin_layer(const layer_routing & routing, const layer_plan & plan, inner_graph & device) {
    HOBBIT_TRY(early_ ? early_->finish() : status());
    const part_set parts = index_.layer(routing.layer).parts;
    routing_             = &routing;
    plan_                = &plan;
    work_.clear();
    for (const planned_use & use : plan.uses) {
        const bool is_present = cache_.holds(use.id, use.tier, parts) && cache_.arrived(use.id, use.tier, parts);
        work_.push_back({ kinds_.of(use.id, use.tier), uint32_t(use.selections.size()), is_present });
        placement_.gain().used(own_term(use));
    }
    is_as_placed_ = unshared_.count(routing.layer) == 0;
    on_cpu_       = is_as_placed_ ? placement_.place(work_, routing.n_tokens) : cpu_experts(work_.size(), false);
    for (size_t i = 0; i < work_.size() && unshared_.count(routing.layer) == 0; i++) {
        if (!work_[i].is_present && is_early(plan.uses[i])) {
            on_cpu_[i]    = true;
            is_as_placed_ = false; // no sample: these rows take no time
        }
    }
    device.measure(is_as_placed_ && placement_.measures_device());
    device_before_ = device.measured();
    cpu_time_      = seconds(0);
    return {};
}

bool cpu_share::pin(const planned_use & use) {
    const auto & terms = index_.terms(use.tier);
    return std::all_of(terms.begin(), terms.end(), [&](term_id term) { return host_.n_slots(term) > 0; }) &&
           host_.acquire(use.id, use.tier);
}

void cpu_share::begin_section(const layer_section & section, part_set parts, const host_copy & known,
                              inner_graph & device) {
    const bool can_share = cpu_rows::can_share(section, *routing_);
    for (const planned_use & use : plan_->uses) {
        if (!computes(use)) {
            continue;
        }
        if (can_share && pin(use)) {
            pinned_.push_back(&use);
        } else {
            on_cpu_[index_of(use)] = false;
            is_as_placed_          = false;
        }
    }
    if (!can_share && !is_as_placed_) {
        if (unshared_.empty()) {
            GGML_LOG_WARN("hobbit: the device computes some experts alone: this model has operations between their "
                          "products that the CPU cannot share\n");
        }
        unshared_.insert(routing_->layer);
    }
    parts_ = parts;
    if (early_ && can_share && routing_->n_tokens == 1 && parts == index_.layer(routing_->layer).parts) {
        early_->learn(section, routing_->layer);
    }
    if (has_rows()) {
        const auto start    = clock::now();
        const bool is_whole = parts == index_.layer(routing_->layer).parts;
        std::stable_partition(pinned_.begin(), pinned_.end(), [&](const planned_use * use) { return is_early(*use); });
        for (const planned_use * use : pinned_) {
            host_.request(use->id, use->tier, parts);
        }
        rows_.begin(section, *routing_, pinned_, known, device);
        stats_.selections_early += is_whole && is_early(*pinned_.front()) ? rows_.adopt(early_->rows()) : 0;
        cpu_time_               += clock::now() - start;
    }
}

status cpu_share::compute_next(inner_graph & cpu) {
    const cpu_rows::piece next = rows_.next();
    for (size_t i = next.first; i < next.end; i++) {
        HOBBIT_TRY(host_.wait(pinned_[i]->id, pinned_[i]->tier, parts_));
    }
    const auto   start  = clock::now();
    const status s      = rows_.compute_next(cpu);
    cpu_time_          += clock::now() - start;
    return s;
}

status cpu_share::end_section(inner_graph & device) {
    if (!has_rows()) {
        return {};
    }
    HOBBIT_TRY(device.launch());
    device.measure(false); // what follows is the CPU's
    const auto   start  = clock::now();
    const status s      = rows_.copy_back(device);
    cpu_time_          += clock::now() - start;
    release();
    device.measure(is_as_placed_ && placement_.measures_device());
    return s;
}

void cpu_share::abandon() {
    release();
    if (early_) {
        early_->finish(); // its error, if any, is of no use now
    }
}

void cpu_share::release() {
    for (const planned_use * use : pinned_) {
        host_.release(use->id, use->tier);
    }
    pinned_.clear();
}

// Samples are taken of layers that went as they were placed.
void cpu_share::end_layer(inner_graph & device) {
    device.measure(false);
    if (std::find(on_cpu_.begin(), on_cpu_.end(), true) != on_cpu_.end()) {
        stats_.cpu_ns += uint64_t(cpu_time_.count() * 1e9);
        if (is_as_placed_) {
            placement_.cpu_took(work_, on_cpu_, cpu_time_.count());
        }
    }
    if (is_as_placed_ && placement_.measures_device()) {
        placement_.device_took(work_, on_cpu_, seconds(device.measured() - device_before_).count());
    }
    learn_link();
    upload();
}

void cpu_share::learn_link() {
    const loader::transfers now = cache_.transferred();
    if (now.bytes > link_.bytes && now.ns > link_.ns) {
        placement_.link_took(double(now.bytes - link_.bytes), double(now.ns - link_.ns) * 1e-9);
        link_ = now;
    }
}

// What the CPU has computed may be needed again: one expert at a time is uploaded, while nothing else is.
void cpu_share::upload() {
    const auto now = clock::now();
    placement_.pass(seconds(now - passed_).count());
    passed_ = now;
    for (const planned_use & use : plan_->uses) {
        if (!computes(use)) {
            continue;
        }
        stats_.selections_cpu += use.selections.size();
        const bool is_free     = cache_.has_free_slot(own_term(use).term);
        if ((is_free || placement_.may_upload()) && cache_.upload(use.id, use.tier, index_.layer(use.id.layer).parts) &&
            !is_free) {
            placement_.begin_upload(kinds_.of(use.id, use.tier));
        }
    }
}

} // namespace hobbit
