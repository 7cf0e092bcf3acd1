// SPDX-License-Identifier: MIT
#include "engine/device-engines.h"

#include "device/device-traits.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "offload/cpu-rows.h"
#include "plan/layer-assignment.h"

#include <algorithm>
#include <numeric>

namespace hobbit {

device_engines::device_engines(split_runner * runner, const std::vector<ggml_backend_dev_t> & devices,
                               const expert_index & index, const settings & config, loader & loader, stats & stats,
                               ggml_backend_buffer_type_t transfer_memory) :
    index_(index), config_(config), stats_(stats), transfer_memory_(transfer_memory) {
    if (!is_host_device(devices.front())) {
        expert_cache::pool_place in_host;
        in_host.memory = transfer_memory;
        host_          = std::make_unique<expert_cache>(index, loader, host_stats_, in_host);
    }
    for (ggml_backend_dev_t device : devices) {
        const shared_parts shared = { index, config, loader, stats, host_.get(), given_ };
        places_.push_back(std::make_unique<device_engine>(runner, device, shared));
    }
}

//
// layers
//

std::optional<layer_id> device_engines::find_layer(int64_t block) const {
    for (layer_id layer = 0; layer < index_.n_layers(); layer++) {
        if (index_.layer(layer).block == block) {
            return layer;
        }
    }
    return {};
}

std::vector<layer_id> device_engines::all_layers() const {
    std::vector<layer_id> all;
    for (layer_id layer = 0; layer < index_.n_layers(); layer++) {
        all.push_back(layer);
    }
    return all;
}

void device_engines::place_layers(const ggml_backend_dev_t * devices, size_t n_devices) {
    std::vector<std::optional<uint32_t>> given(index_.n_layers());
    std::vector<uint64_t>                free;
    for (uint32_t i = 0; i < places_.size(); i++) {
        free.push_back(places_.size() > 1 ? free_memory(places_[i]->device()) : 0);
        for (layer_id layer = 0; layer < index_.n_layers(); layer++) {
            const uint32_t block = index_.layer(layer).block;
            if (block < n_devices && devices[block] == places_[i]->device()) {
                given[layer] = i;
            }
        }
    }
    layer_places_ = assign_layers(given, free);
    std::vector<std::vector<layer_id>> own(places_.size());
    for (layer_id layer = 0; layer < index_.n_layers(); layer++) {
        own[layer_places_[layer]].push_back(layer);
    }
    for (size_t i = 0; i < places_.size(); i++) {
        places_[i]->set_layers(std::move(own[i]));
    }
}

device_engine & device_engines::of_block(int64_t block) const {
    const auto layer = find_layer(block);
    return *places_[layer ? layer_places_[*layer] : 0];
}

status device_engines::set_router(uint32_t block, const ggml_tensor * weight, const ggml_tensor * bias,
                                  const ggml_tensor * selection_bias, hobbit_gating gating) {
    const auto layer = find_layer(block);
    for (size_t i = 0; i < places_.size() && layer; i++) {
        HOBBIT_TRY(places_[i]->set_router(*layer, weight, bias, selection_bias, gating));
    }
    return {};
}

//
// memory
//

// Rows of one batch, and copies of routers, in host memory: the pools' own, or those of the CPU's share.
uint64_t device_engines::host_rows(uint32_t n_batch) const {
    if (!host_) {
        return places_.front()->rows(n_batch);
    }
    const uint64_t n_used     = demand_of(index_, *host_, all_layers()).n_used;
    const uint32_t n_together = std::max(n_batch, uint32_t(inner_graph::enough_rows));
    uint64_t       bytes      = 0;
    for (const auto & place : places_) {
        bytes += place->n_layers() > 0 ? cpu_rows::size(index_, n_batch * n_used, n_together) : 0;
    }
    return bytes;
}

status device_engines::plan_host(const other_memory & other, memory_plan & plan) const {
    pool_plan here;
    HOBBIT_TRY(plan_pools(config_.bounds(), places_.front()->demand(), other, here));
    plan.n_slots = { here.n_slots };
    return {};
}

status device_engines::plan_devices(other_memory other, uint32_t n_batch, memory_plan & plan) const {
    const pool_demand         host = demand_of(index_, *host_, all_layers());
    std::vector<device_share> devices;
    for (const auto & place : places_) {
        devices.push_back({ place->demand(), place->rows(n_batch) });
    }
    std::vector<budget> shared;
    HOBBIT_TRY(share_bounds(config_.bounds(), devices, shared));
    for (size_t i = 0; i < places_.size(); i++) {
        pool_plan here;
        if (places_[i]->n_layers() > 0) {
            other.device = places_[i]->memory(devices[i].rows, host);
            HOBBIT_TRY(plan_pools(shared[i], devices[i].demand, other, here));
            plan.n_host_slots = here.n_host_slots; // the same for each
        }
        plan.n_slots.push_back(here.n_slots);
    }
    return {};
}

status device_engines::plan_all(other_memory other, uint32_t n_batch, memory_plan & plan) const {
    other.scratch += host_rows(n_batch);
    return host_ ? plan_devices(other, n_batch, plan) : plan_host(other, plan);
}

uint64_t device_engines::pool_bytes(const memory_plan & plan) const {
    uint64_t bytes = 0;
    for (size_t i = 0; i < places_.size(); i++) {
        for (const term_id term : index_.stored_terms()) {
            bytes += plan.n_slots[i][term] * places_[i]->cache().slot_size(term);
        }
    }
    return bytes;
}

bool device_engines::holds_all(const memory_plan & plan) const {
    bool all = true;
    for (size_t i = 0; i < places_.size(); i++) {
        const pool_demand d = places_[i]->demand();
        all                 = all && plan.n_slots[i][term_id::high] >= d.n_experts - d.n_absent;
        if (d.low_per_high > 0 || d.n_absent > 0) { // an expert's best precision takes its low version
            all = all && plan.n_slots[i][term_id::low] >= (d.low_per_high > 0 ? d.n_experts : d.n_absent);
        }
    }
    return all;
}

status device_engines::plan(const other_memory & other, uint32_t n_batch, hobbit_pool_plan & plan) const {
    memory_plan all;
    HOBBIT_TRY(plan_all(other, n_batch, all));
    plan.pool_bytes  = pool_bytes(all);
    plan.batch_bytes = host_rows(n_batch);
    for (size_t i = 0; host_ && i < places_.size(); i++) {
        plan.batch_bytes += places_[i]->n_layers() > 0 ? places_[i]->rows(n_batch) : 0;
    }
    plan.holds_all = holds_all(all);
    return {};
}

status device_engines::start_sharing(const pool_slots & host_slots) {
    if (host_slots[term_id::high] == 0) {
        return config_.mode != compute_mode::cooperative
                   ? status()
                   : status::error("hobbit.mode=cooperative computes experts in host memory, which has no room for "
                                   "them: give a larger --memory");
    }
    if (config_.mode == compute_mode::gpu) {
        return {};
    }
    kinds_.emplace(index_);
    for (const auto & place : places_) {
        if (place->n_layers() > 0) {
            place->start_sharing(*kinds_);
        }
    }
    return {};
}

status device_engines::allocate_pools(const memory_plan & plan, cache_policy & policy) {
    for (size_t i = 0; i < places_.size(); i++) {
        HOBBIT_TRY(places_[i]->allocate(plan.n_slots[i], policy));
        if (places_[i]->n_layers() == 0) {
            GGML_LOG_WARN("hobbit: %s computes no layer with experts\n", ggml_backend_dev_name(places_[i]->device()));
        }
    }
    if (!host_) {
        return {};
    }
    const bool   is_locked = transfer_memory_ != ggml_backend_cpu_buffer_type();
    const char * where     = is_locked ? "the host, page-locked, behind it" : "the host, behind it";
    HOBBIT_TRY(hobbit::allocate_pools(index_, *host_, all_layers(), plan.n_host_slots, policy, where));
    for (const term_id term : index_.stored_terms()) {
        uint32_t n_above = 0;
        for (const auto & place : places_) {
            n_above += place->cache().n_slots(term);
        }
        if (host_->n_slots(term) <= n_above) {
            host_->make_exclusive(term);
        }
    }
    if (host_->n_slots(term_id::high) == 0) {
        GGML_LOG_WARN("hobbit: host memory has no room to cache experts: each miss on %s reads from disk; "
                      "give a larger --memory\n",
                      config_.device.c_str());
    }
    return {};
}

status device_engines::allocate(const other_memory & other, uint32_t n_batch, cache_policy & policy) {
    memory_plan plan;
    HOBBIT_TRY(plan_all(other, n_batch, plan));
    HOBBIT_TRY(host_ ? start_sharing(plan.n_host_slots) : status());
    return allocate_pools(plan, policy);
}

//
// computing
//

void device_engines::start(run_state & run, rule_options rule, const std::vector<expert_id> & most_used) {
    if (config_.prefetch > 0) {
        std::vector<prefetcher::layer_place> ahead;
        for (const uint32_t i : layer_places_) {
            ahead.push_back(places_[i]->ahead());
        }
        if (rule.name == "random") {
            rule.name = "gate"; // a draw cannot be predicted
        }
        prefetcher_ = std::make_unique<prefetcher>(index_, ahead, config_.prefetch, make_rule(rule), run.thresholds,
                                                   run.batch, stats_);
    }
    for (const auto & place : places_) {
        place->start(prefetcher_.get(), run);
    }
    fill(most_used);
}

// What earlier runs used most is read while nothing else is to be done: the first tokens find it. Host memory has what
// the devices have no slots for. The first computation waits for the devices' part; see compute().
void device_engines::fill(const std::vector<expert_id> & most_used) {
    std::vector<term_id> terms = index_.stored_terms();
    std::reverse(terms.begin(), terms.end()); // the high one may be stored on the low one
    for (const term_id term : terms) {
        for (const auto & place : places_) {
            place->fill(term, most_used);
        }
    }
    is_filling_ = host_ != nullptr;
    for (size_t i = 0; host_ && i < terms.size(); i++) {
        const tier_id tier = tier_of(terms[i]);

        std::vector<expert_id> rest     = most_used;
        const auto             is_there = [&](expert_id id) { // on a device alone
            return !host_->holds(id, tier, {}) && std::any_of(places_.begin(), places_.end(), [&](const auto & place) {
                return place->cache().holds(id, tier, {});
            });
        };
        rest.erase(std::remove_if(rest.begin(), rest.end(), is_there), rest.end());
        host_->fill(terms[i], rest);
    }
}

status device_engines::compute(ggml_cgraph * graph, ggml_backend_dev_t device, inner_graph & inner, inner_graph * cpu) {
    const auto is_there = [&](const auto & place) { return place->buffer_type()->device == device; };
    const auto place    = std::find_if(places_.begin(), places_.end(), is_there);
    GGML_ASSERT(place != places_.end());
    for (size_t i = 0; is_filling_ && i < places_.size(); i++) {
        HOBBIT_TRY(places_[i]->cache().await_fill([&] { return inner.is_aborted(); }));
    }
    is_filling_ = false;
    return (*place)->executor().compute(graph, inner, cpu);
}

bool device_engines::has_low_pool() const {
    return std::any_of(places_.begin(), places_.end(),
                       [](const auto & place) { return place->cache().n_slots(term_id::low) > 0; });
}

void device_engines::describe(hobbit_info & info) const {
    for (const auto & place : places_) {
        const hobbit_device_info here  = place->info();
        info.pool_slots_high          += here.pool_slots_high;
        info.pool_slots_low           += here.pool_slots_low;
        info.pool_bytes_high          += here.pool_bytes_high;
        info.pool_bytes_low           += here.pool_bytes_low;
    }
    if (host_) {
        info.host_slots_high = host_->n_slots(term_id::high);
        info.host_slots_low  = host_->n_slots(term_id::low);
        info.host_bytes_high = info.host_slots_high * host_->slot_size(term_id::high);
        info.host_bytes_low  = info.host_slots_low * host_->slot_size(term_id::low);
    }
    info.on_device = are_apart();
}

} // namespace hobbit
