// SPDX-License-Identifier: MIT
#include "engine/device-engine.h"

#include "device/device-traits.h"
#include "ggml-impl.h"

#include <algorithm>
#include <iterator>

namespace hobbit {

device_engine::device_engine(split_runner * runner, ggml_backend_dev_t device, const shared_parts & shared) :
    shared_(shared),
    device_(device),
    buffer_type_(ggml_backend_hobbit_make_buffer_type(runner, ggml_backend_hobbit_register(device))),
    cache_(shared.index, shared.reads, shared.counters,
           { device, shared.config.flag("hobbit.pack") && !shared.host, shared.host,
             shared.host ? nullptr : shared.memory, shared.config.spare_memory() }) {
    if (shared.config.count("hobbit.prefetch") > 0) {
        predictor_options options;
        options.name      = shared.config.text("hobbit.predictor");
        options.memory    = ggml_backend_dev_buffer_type(device);
        options.paths     = shared.index.calibration().paths;
        options.bar       = shared.config.number("hobbit.prefetch_bar");
        options.n_experts = shared.index.experts_by_layer();
        options.width     = uint32_t(shared.index.width());
        for (layer_id layer = 0; layer < shared.index.n_layers(); layer++) {
            options.n_used.push_back(shared.index.layer(layer).n_used);
        }
        predictor_ = registered_predictor::make(options);
    }
}

//
// memory
//

uint64_t device_engine::rows(uint32_t n_batch) const {
    const expert_index & index = shared_.index;
    int64_t              n_in  = 0;
    int64_t              n_out = 0;
    int64_t              n_all = 0; // outputs of all parts of a layer
    for (const layer_id layer : layers_) {
        int64_t n_here = 0;
        for (const matrix_shape & shape : index.layer(layer).shapes) {
            n_in    = std::max(n_in, shape.n_in);
            n_out   = std::max(n_out, shape.n_out);
            n_here += shape.n_out;
        }
        n_all = std::max(n_all, n_here);
    }
    const uint64_t n_rows = std::max(n_batch, uint32_t(inner_graph::enough_rows));
    uint64_t       bytes  = uint64_t(n_in + n_out) * sizeof(float) * n_rows + inner_graph::max_work_size;
    for (const tier_id tier : index.tiers()) {
        bytes += cache_.overhead(tier);
    }
    if (shared_.host) { // rows that come from host memory
        bytes += uint64_t(n_all) * sizeof(float) * uint64_t(inner_graph::enough_rows);
    }
    return bytes + predictor_bytes();
}

device_memory device_engine::memory(uint64_t rows, const pool_demand & host) const {
    return { ggml_backend_dev_name(device_), free_memory(device_), rows, host };
}

status allocate_pools(expert_cache & cache, const std::vector<layer_id> & layers, const pool_slots & slots,
                      cache_policy & policy, const char * where) {
    const pool_demand wanted = cache.demand(layers);
    for (const tier_id tier : TIERS) {
        if (count_of(slots[tier]) == 0) {
            continue;
        }
        HOBBIT_TRY(cache.allocate(tier, slots[tier], wanted.classes[tier], wanted.n_used, policy));
        GGML_LOG_INFO("hobbit: %s-precision pool of %u of %u experts, %s on %s\n", tier_name(tier), cache.n_slots(tier),
                      count_of(wanted.all(tier)), format_size(double(cache.bytes(tier))).c_str(), where);
    }
    return {};
}

status device_engine::allocate(const pool_slots & slots, cache_policy & policy) {
    return allocate_pools(cache_, layers_, slots, policy, ggml_backend_dev_name(device_));
}

void device_engine::fill(tier_id tier, const std::vector<expert_id> & most_used) {
    std::vector<expert_id> own;
    std::copy_if(most_used.begin(), most_used.end(), std::back_inserter(own),
                 [&](expert_id id) { return std::binary_search(layers_.begin(), layers_.end(), id.layer); });
    cache_.fill(tier, own);
}

//
// computing
//

void device_engine::start_sharing() {
    executor_.reset(); // its hooks know the share
    share_.reset();    // unregisters its listener of replacements, before the next one registers its own
    share_ = std::make_unique<cpu_share>(shared_.index, cache_, *shared_.host, traits_of(device_).upload_share,
                                         shared_.config.mode(), shared_.counters);
}

void device_engine::start(prefetcher * prefetcher, run_state & run) {
    ahead_                                  = std::make_unique<hits_ahead>(shared_.index, cache_);
    const std::vector<row_source *> sources = { prefetcher, ahead_.get(), share_.get() };
    executor_ = std::make_unique<moe_executor>(shared_.index, cache_, sources, run, shared_.counters);
    executor_->add(make_hooks({ "", shared_.config.values(), shared_.index, shared_.counters, cache_, shared_.host,
                                predictor_.get(), share_.get() }));
}

hobbit_device_info device_engine::info(const pool_slots & slots) const {
    hobbit_device_info i = {};
    i.name               = ggml_backend_dev_name(device_);
    i.n_layers           = n_layers();
    i.pool_slots_high    = count_of(slots[tier_id::high]);
    i.pool_slots_low     = count_of(slots[tier_id::low]);
    i.pool_bytes_high    = cache_.bytes(tier_id::high, slots[tier_id::high]);
    i.pool_bytes_low     = cache_.bytes(tier_id::low, slots[tier_id::low]);
    i.bytes_transferred  = cache_.transferred().bytes;
    return i;
}

} // namespace hobbit
