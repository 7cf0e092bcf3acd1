// SPDX-License-Identifier: MIT
#include "offload/cpu-share.h"

#include "ggml-impl.h"
#include "plan/batch-info.h"

#include <algorithm>

namespace hobbit {

cpu_share::cpu_share(const expert_index & index, expert_cache & cache, expert_cache & host, double upload_share,
                     compute_mode mode, stats & stats) :
    index_(index),
    cache_(cache),
    host_(host),
    stats_(stats),
    placement_(upload_share, mode),
    rows_(index, host),
    passed_(clock::now()) {
    cache_.set_replacement_listener([this](const auto & in, const auto & out) { placement_.gain().replaced(in, out); });
}

void cpu_share::before_routing(next_layer & next) {
    const bool expects_rows = next.ahead || n_layers_without_ < 2 * index_.n_layers();
    // a batch of a prompt has a large input, which the CPU seldom needs
    next.wants_input = expects_rows && next.device.empty() && next.matmul->src[2]->ne[1] <= batch_info::max_generated;
}

void cpu_share::begin_layer(const running_layer & layer, inner_graph & device) {
    routing_ = &layer.routing;
    plan_    = &layer.plan;
    work_.clear();
    for (const planned_use & use : plan_->uses) {
        const bool is_present =
            cache_.holds(use.id, use.tier, all_parts()) && cache_.arrived(use.id, use.tier, all_parts());
        work_.push_back({ index_.expert_bytes(use.id, use.tier), uint32_t(use.selections.size()), is_present });
        placement_.gain().used({ use.id, use.tier });
    }
    on_cpu_       = placement_.place(work_, routing_->n_tokens, layer.ahead);
    is_as_placed_ = true;
    for (size_t i = 0; i < work_.size(); i++) {
        if (!work_[i].is_present && is_ready(plan_->uses[i])) {
            on_cpu_[i]    = true;
            is_as_placed_ = false; // no sample: these rows take no time
        }
    }
    device.measure(is_measured());
    device_before_ = device.measured();
    cpu_time_      = seconds(0);
}

// Pins the expert's slot in the host cache; false if it has none.
bool cpu_share::pin(const planned_use & use) {
    return host_.n_slots(use.tier) > 0 && host_.acquire(use.id, use.tier);
}

void cpu_share::begin_section(const layer_section & section, const host_copy & known, inner_graph & device) {
    const bool can_share = cpu_rows::can_share(section, *routing_);
    for (const planned_use & use : plan_->uses) {
        if (computes(use) && can_share && pin(use)) {
            pinned_.push_back(&use);
        } else if (computes(use)) {
            on_cpu_[index_of(use)] = is_as_placed_ = false;
        }
    }
    if (!can_share && !is_as_placed_ && !has_warned_) {
        GGML_LOG_WARN("hobbit: the device computes some experts alone: this model has operations between their "
                      "products that the CPU cannot share\n");
        has_warned_ = true;
    }
    parts_              = section.parts;
    const bool is_whole = parts_ == all_parts();
    if (source_ && can_share && routing_->n_tokens == 1 && is_whole) {
        source_->learn(section, routing_->layer);
    }
    if (has_rows()) {
        const auto start = clock::now();
        std::stable_partition(pinned_.begin(), pinned_.end(), [&](const planned_use * use) { return is_ready(*use); });
        for (const planned_use * use : pinned_) {
            host_.request(use->id, use->tier, parts_);
        }
        rows_.begin(nodes_of(section), *routing_, pinned_, known, device);
        if (is_whole && is_ready(*pinned_.front())) {
            source_->took(rows_.adopt(*ready()));
        }
        cpu_time_ += clock::now() - start;
    }
}

status cpu_share::compute_next(const inner_graphs & on) {
    const cpu_rows::piece next = rows_.next();
    for (size_t i = next.first; i < next.end; i++) {
        HOBBIT_TRY(host_.wait(pinned_[i]->id, pinned_[i]->tier, parts_));
    }
    const auto   start  = clock::now();
    const status s      = rows_.compute_next(*on.cpu);
    cpu_time_          += clock::now() - start;
    return s;
}

status cpu_share::end_section(inner_graph & device) {
    if (!has_rows()) {
        return {};
    }
    HOBBIT_TRY(device.launch());
    device.measure(false); // the next part is the CPU's
    const auto   start  = clock::now();
    const status s      = rows_.copy_back(device);
    cpu_time_          += clock::now() - start;
    release();
    device.measure(is_measured());
    return s;
}

void cpu_share::release() {
    for (const planned_use * use : pinned_) {
        host_.release(use->id, use->tier);
    }
    pinned_.clear();
}

// Samples are taken of layers that went as they were placed.
void cpu_share::end_layer(inner_graph & device) {
    const bool has_any = std::find(on_cpu_.begin(), on_cpu_.end(), true) != on_cpu_.end();
    n_layers_without_  = has_any ? 0 : n_layers_without_ + 1;
    device.measure(false);
    stats_.cpu_ns += uint64_t(cpu_time_.count() * 1e9);
    if (is_as_placed_) {
        placement_.cpu_took(work_, on_cpu_, cpu_time_.count());
    }
    if (is_measured()) {
        placement_.device_took(work_, on_cpu_, seconds(device.measured() - device_before_).count());
    }
    const loader::transfers link = cache_.transferred();
    if (link.bytes > link_.bytes && link.ns > link_.ns) {
        placement_.link_took(double(link.bytes - link_.bytes), double(link.ns - link_.ns) * 1e-9);
        link_ = link;
    }
    const auto time = clock::now();
    placement_.pass(seconds(time - passed_).count());
    passed_ = time;
    // an expert that the CPU computed may be needed again: one at a time is uploaded, while nothing else is
    for (const planned_use & use : plan_->uses) {
        const bool is_free     = cache_.has_free_slot(use.id, use.tier);
        const bool may_upload  = computes(use) && (is_free || placement_.may_upload());
        stats_.selections_cpu += computes(use) ? use.selections.size() : 0;
        if (may_upload && cache_.upload(use.id, use.tier, all_parts()) && !is_free) {
            placement_.begin_upload(index_.expert_bytes(use.id, use.tier));
        }
    }
}

} // namespace hobbit
