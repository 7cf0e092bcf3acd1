// SPDX-License-Identifier: MIT
#include "hobbit-model.h"

#include "ggml-hobbit.h"
#include "ggml-impl.h"
#include "memory.h"

#include <algorithm>

using namespace hobbit;

status hobbit_model::open(const std::string & path, const hobbit_setting * given, size_t n_given,
                          std::unique_ptr<hobbit_model> & model) {
    std::unique_ptr<hobbit_model> opened(new hobbit_model);
    opened->resident_before_ = resident_memory();

    status s = opened->settings_.apply(given, n_given);
    if (s.ok()) {
        s = opened->index_.open(path, opened->settings_.sidecar);
    }
    if (!s.ok()) {
        return s;
    }

    const expert_index & index = opened->index_;
    const bool           asked = opened->settings_.asked();
    if (index.n_layers() == 0) {
        if (asked) {
            GGML_LOG_WARN("hobbit: '%s' has no routed experts: there is nothing to offload, it runs as stock\n",
                          path.c_str());
        }
        return {};
    }
    if (index.n_tiers() == 1 && !asked) {
        if (index.model_bytes() + index.model_bytes() / 10 < available_memory()) {
            return {};
        }
        GGML_LOG_WARN("hobbit: '%s' does not fit into free memory: its experts stay on disk, in a cache\n",
                      path.c_str());
    }
    s = opened->settings_.apply_stored(index.stored_settings());
    if (s.ok()) {
        s = opened->start();
    }
    if (s.ok()) {
        model = std::move(opened);
    }
    return s;
}

status hobbit_model::start() {
    if (settings_.thresholds.t1 < 1.0 && settings_.thresholds.t2 > settings_.thresholds.t1 && index_.n_tiers() == 1) {
        return status::error(
            format("t1 = %g asks for low-precision experts, and '%s' has none: add them with pyhobbit convert, "
                   "or leave t1 at 1",
                   settings_.thresholds.t1, index_.files()[0].c_str()));
    }
    for (const std::string & file : index_.files()) {
        const status s = reader_.open(file);
        if (!s.ok()) {
            return s;
        }
    }
    if (!reader_.direct_io()) {
        GGML_LOG_WARN("hobbit: the file system of '%s' has no direct I/O: reads go through the page cache\n",
                      index_.files()[0].c_str());
    }
    ggml_backend_hobbit_register();
    buffer_type_ = ggml_backend_hobbit_make_buffer_type(this);
    loader_      = std::make_unique<loader>(reader_, stats_, settings_.io_threads);
    cache_       = std::make_unique<expert_cache>(index_, *loader_, stats_);
    executor_    = std::make_unique<moe_executor>(index_, *cache_, settings_.thresholds, stats_);
    return {};
}

pool_demand hobbit_model::demand() const {
    pool_demand d;
    for (uint32_t tier = 0; tier < index_.n_tiers(); tier++) {
        d.slot_size[tier] = cache_->slot_size(tier);
    }
    for (size_t i = 0; i < index_.n_layers(); i++) {
        d.n_experts += index_.layer(i).n_experts;
    }
    d.n_used = std::max(1u, std::min(index_.n_experts_used(), index_.n_experts()));
    return d;
}

uint64_t hobbit_model::scratch_bytes(uint32_t n_batch) const {
    int64_t n_in  = 0;
    int64_t n_out = 0;
    for (size_t i = 0; i < index_.n_layers(); i++) {
        for (const matrix_shape & shape : index_.layer(i).shapes) {
            n_in  = std::max(n_in, shape.n_in);
            n_out = std::max(n_out, shape.n_out);
        }
    }
    return uint64_t(n_in + n_out) * sizeof(float) * n_batch;
}

status hobbit_model::prepare(uint64_t model_bytes, uint32_t n_batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (prepared_) {
        return {};
    }
    const other_memory other = { resident_before_, model_bytes, scratch_bytes(n_batch), resident_memory(),
                                 available_memory() };
    pool_plan          plan;
    status             s = plan_pools(settings_, demand(), other, plan);
    if (s.ok()) {
        s = allocate_pools(plan);
    }
    prepared_ = s.ok();
    return s;
}

status hobbit_model::allocate_pools(const pool_plan & plan) {
    const ggml_backend_buffer_type_t buft   = ggml_backend_cpu_buffer_type();
    const pool_demand                wanted = demand();
    for (uint32_t tier = 0; tier < index_.n_tiers(); tier++) {
        if (plan.n_slots[tier] == 0) {
            continue;
        }
        const uint32_t floor  = even_floor(plan.n_slots[tier], uint32_t(index_.n_layers()), wanted.n_used);
        auto           policy = std::make_unique<lru_policy>(uint32_t(index_.n_layers()), index_.n_experts(), floor);
        const status   s      = cache_->allocate(tier, buft, plan.n_slots[tier], std::move(policy));
        if (!s.ok()) {
            return s;
        }
        GGML_LOG_INFO("hobbit: %s-precision pool of %u of %u experts, %s\n", tier_name(tier), plan.n_slots[tier],
                      wanted.n_experts,
                      format_size(double(plan.n_slots[tier]) * double(wanted.slot_size[tier])).c_str());
    }
    return {};
}

status hobbit_model::compute(ggml_cgraph * graph, inner_graph & inner) {
    std::lock_guard<std::mutex> lock(mutex_);
    GGML_ASSERT(prepared_);
    return executor_->compute(graph, inner);
}

hobbit_info hobbit_model::info() const {
    std::lock_guard<std::mutex> lock(mutex_);
    hobbit_info                 i = {};
    i.n_layers                    = uint32_t(index_.n_layers());
    i.n_experts                   = index_.n_experts();
    i.n_experts_used              = index_.n_experts_used();
    i.n_tiers                     = index_.n_tiers();
    i.tier_bytes_high             = index_.tier_bytes(TIER_HIGH);
    i.tier_bytes_low              = index_.tier_bytes(TIER_LOW);
    i.pool_slots_high             = cache_->n_slots(TIER_HIGH);
    i.pool_slots_low              = cache_->n_slots(TIER_LOW);
    i.pool_bytes_high             = i.pool_slots_high * cache_->slot_size(TIER_HIGH);
    i.pool_bytes_low              = i.pool_slots_low * cache_->slot_size(TIER_LOW);
    i.t1                          = settings_.thresholds.t1;
    i.t2                          = settings_.thresholds.t2;
    i.direct_io                   = reader_.direct_io();
    return i;
}
