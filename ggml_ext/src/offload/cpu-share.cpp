// SPDX-License-Identifier: MIT
#include "offload/cpu-share.h"

#include "ggml-impl.h"
#include "graph/expert-matmul.h"

#include <algorithm>

namespace hobbit {

cpu_share::cpu_share(const expert_index & index, expert_cache & cache, expert_cache & host, const expert_shapes & kinds,
                     const cost_model & costs, stats & stats) :
    index_(index),
    cache_(cache),
    host_(host),
    kinds_(kinds),
    costs_(costs),
    stats_(stats),
    bypasses_(cache.residents()),
    begun_{ cpu_rows(index, host, inputs_) },
    whole_{ cpu_rows(index, host, inputs_) } {
    cache_.set_prefetch_listener(
        [this](const expert_term & term, layer_id running) { bypasses_.prefetched(term, running); });
}

cpu_share::~cpu_share() {
    cache_.set_prefetch_listener(nullptr);
}

void cpu_share::begin_layer(const layer_routing & routing, const layer_plan & plan, inner_graph & device) {
    const part_set parts = index_.layer(routing.layer).parts;
    routing_             = &routing;
    plan_                = &plan;
    work_.clear();
    uses_.clear();
    for (const planned_use & use : plan.uses) {
        const bool is_held    = cache_.holds(use.id, use.tier, parts);
        const bool is_present = is_held && cache_.arrived(use.id, use.tier, parts);
        work_.push_back({ kinds_.of(use.id, use.tier), uint32_t(use.selections.size()), is_present });
        uses_.push_back({ { use.id, use.tier }, !is_held });
    }
    double further_misses = 0.0;
    if (costs_.chooses()) {
        bypasses_.begin_layer(routing.layer, uses_);
        further_misses = bypasses_.further_misses();
    }
    const bool may_split = unsplit_.count(routing.layer) == 0;
    placement_           = unshared_.count(routing.layer) > 0 ? costs_.leave_to_device(work_)
                                                              : costs_.place(work_, may_split, further_misses);
    began_               = { clock::now(), device.measured(), stats_.bytes_read };
    device.measure(placement_.measures_device);
    cpu_time_     = seconds(0);
    is_as_placed_ = true;
}

bool cpu_share::pin(const planned_use & use) {
    const auto & terms = index_.terms(use.tier);
    return std::all_of(terms.begin(), terms.end(), [&](term_id term) { return host_.n_slots(term) > 0; }) &&
           host_.acquire(use.id, use.tier);
}

void cpu_share::place_otherwise(const planned_use & use, computed_by by) {
    placed(use)   = by;
    is_as_placed_ = false;
}

// Number of the node that is the last product, or of the section's end.
static int find_down(const layer_section & section) {
    const auto is_down = [](const ggml_tensor * node) {
        return node->op == GGML_OP_MUL_MAT_ID && !is_noop(node) && expert_of(node).part == part_id::down;
    };
    int i = section.first;
    while (i < section.end && !is_down(ggml_graph_node(section.graph, i))) {
        i++;
    }
    return i;
}

void cpu_share::begin_section(const layer_section & section, part_set parts) {
    const bool     can_share = cpu_rows::can_share(section, *routing_);
    const part_set before    = parts - part_id::down;
    const bool     can_split = before && before != parts;
    for (const planned_use & use : plan_->uses) {
        if (is_split(use) && !can_split) {
            place_otherwise(use, computed_by::cpu);
            unsplit_.insert(routing_->layer);
        }
        if (placed(use) == computed_by::device) {
            continue;
        }
        if (can_share && pin(use)) {
            (is_split(use) ? begun_ : whole_).pinned.push_back(&use);
        } else {
            place_otherwise(use, computed_by::device);
        }
    }
    if (!can_share && !is_as_placed_) {
        if (unshared_.empty()) {
            GGML_LOG_WARN("hobbit: the device computes some experts alone: this model has operations between their "
                          "products that the CPU cannot share\n");
        }
        unshared_.insert(routing_->layer);
    }
    inputs_.clear();
    begin_rows(begun_, section, find_down(section), before);
    begin_rows(whole_, section, section.end, parts);
}

void cpu_share::begin_rows(rows_in_hand & some, const layer_section & section, int end, part_set parts) {
    const auto start = clock::now();
    some.parts       = parts;
    some.has_rows    = !some.pinned.empty();
    if (some.has_rows) {
        for (const planned_use * use : some.pinned) {
            host_.request(use->id, use->tier, parts);
        }
        some.rows.begin(section, end, *routing_, some.pinned);
        cpu_time_ += clock::now() - start;
    }
}

status cpu_share::compute_next(inner_graph & cpu) {
    return compute_next(is_due_to_hand_over() ? begun_ : whole_, cpu);
}

status cpu_share::compute_next(rows_in_hand & some, inner_graph & cpu) {
    const cpu_rows::piece next = some.rows.next();
    for (size_t i = next.first; i < next.end; i++) {
        const status s = host_.wait(some.pinned[i]->id, some.pinned[i]->tier, some.parts);
        if (!s.ok()) {
            return s;
        }
    }
    const auto   start  = clock::now();
    const status s      = some.rows.compute_next(cpu);
    cpu_time_          += clock::now() - start;
    return s;
}

status cpu_share::bring_rows(rows_in_hand & some, inner_graph & device) {
    if (!some.has_rows) {
        return {};
    }
    device.measure(false); // what follows is the CPU's
    const auto   start  = clock::now();
    const status s      = some.rows.copy_back(device);
    cpu_time_          += clock::now() - start;
    some.has_rows       = false;
    device.measure(placement_.measures_device);
    return s;
}

status cpu_share::hand_over(inner_graph & device) {
    return bring_rows(begun_, device);
}

status cpu_share::end_section(inner_graph & device) {
    const status s = bring_rows(whole_, device);
    release();
    return s.ok() ? device.compute() : s;
}

void cpu_share::release() {
    for (rows_in_hand * some : { &begun_, &whole_ }) {
        for (const planned_use * use : some->pinned) {
            host_.release(use->id, use->tier);
        }
        some->pinned.clear();
        some->has_rows = false;
    }
}

// What went as it was placed is a sample of who was at work.
void cpu_share::end_layer(const ggml_tensor * output, inner_graph & device, inner_graph & cpu) {
    const bool can_tell = is_as_placed_ && stats_.bytes_read == began_.bytes_read;
    const bool is_told  = can_tell && placement_.measures_layer;
    if (is_told) {
        wait_until_computed(device.backend(), output);
    }
    device.measure(false);
    const seconds took    = clock::now() - began_.time;
    const auto &  by      = placement_.by;
    const bool any_on_cpu = std::any_of(by.begin(), by.end(), [](computed_by b) { return b != computed_by::device; });
    if (any_on_cpu) {
        stats_.cpu_ns += uint64_t(cpu_time_.count() * 1e9);
    }
    if (is_as_placed_ && any_on_cpu) {
        costs_.cpu_took(work_, by, cpu_time_.count());
    }
    if (placement_.measures_device && is_as_placed_) {
        costs_.device_took(work_, by, seconds(device.measured() - began_.device).count());
    } else if (placement_.measures_device) {
        costs_.discard_device_sample();
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
    for (size_t i = 0; i < plan_->uses.size(); i++) {
        const planned_use & use = plan_->uses[i];
        if (placed(use) == computed_by::device) {
            continue;
        }
        stats_.selections_cpu   += use.selections.size();
        stats_.selections_split += is_split(use) ? use.selections.size() : 0;
        cache_.bring(use.id, use.tier, index_.layer(use.id.layer).parts);
        if (costs_.chooses() && uses_[i].is_missed) {
            bypasses_.bypassed(uses_[i].expert);
        }
    }
}

} // namespace hobbit
