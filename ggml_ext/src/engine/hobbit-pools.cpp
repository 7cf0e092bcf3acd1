// SPDX-License-Identifier: MIT
//
// The devices of a model and its memory: what its first context allocates, and what a further one is refused.
#include "base/system-memory.h"
#include "device/device-traits.h"
#include "engine/hobbit-model.h"
#include "ggml-impl.h"

#include <algorithm>
#include <iterator>

using namespace hobbit;

device_engine::device_engine(hobbit_model & model, ggml_backend_dev_t device) :
    model_(model),
    device_(device),
    buffer_type_(ggml_backend_hobbit_make_buffer_type(&model, ggml_backend_hobbit_register(device))),
    cache_(model.index_, *model.loader_, model.stats_,
           { device, model.settings_.flag("hobbit.pack") && !model.host_, model.host_.get(),
             model.host_ ? nullptr : model.transfer_memory_, model.settings_.spare_memory() }) {
    if (model.settings_.count("hobbit.prefetch") > 0) {
        predictor_options options;
        options.name      = model.settings_.text("hobbit.predictor");
        options.memory    = ggml_backend_dev_buffer_type(device);
        options.paths     = model.index_.calibration().paths;
        options.bar       = model.settings_.number("hobbit.prefetch_bar");
        options.n_experts = model.index_.experts_by_layer();
        options.width     = uint32_t(model.index_.width());
        for (layer_id layer = 0; layer < model.index_.n_layers(); layer++) {
            options.n_used.push_back(model.index_.layer(layer).n_used);
        }
        predictor_ = registered_predictor::make(options);
    }
}

uint64_t device_engine::rows(uint32_t n_batch) const {
    const expert_index & index = model_.index_;
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
    if (model_.host_) { // rows that come from host memory
        bytes += uint64_t(n_all) * sizeof(float) * uint64_t(inner_graph::enough_rows);
    }
    return bytes + predictor_bytes();
}

void device_engine::fill(tier_id tier, const std::vector<expert_id> & most_used) {
    std::vector<expert_id> own;
    std::copy_if(most_used.begin(), most_used.end(), std::back_inserter(own),
                 [&](expert_id id) { return std::binary_search(layers_.begin(), layers_.end(), id.layer); });
    cache_.fill(tier, own);
}

void device_engine::start_sharing() {
    executor_.reset(); // its hooks know the share
    share_.reset();    // unregisters its listener of replacements, before the next one registers its own
    share_ = std::make_unique<cpu_share>(model_.index_, cache_, *model_.host_, traits_of(device_).upload_share,
                                         model_.settings_.mode(), model_.stats_);
}

void device_engine::start(prefetcher * prefetcher, run_state & run) {
    ahead_                                  = std::make_unique<hits_ahead>(model_.index_, cache_);
    const std::vector<row_source *> sources = { prefetcher, ahead_.get(), share_.get() };
    executor_ = std::make_unique<moe_executor>(model_.index_, cache_, sources, run, model_.stats_);
    executor_->add(make_hooks({ "", model_.settings_, model_.index_, model_.stats_, cache_, model_.host_.get(),
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

other_memory hobbit_model::memory_beside(uint64_t model_bytes) const {
    const bool     is_staged = settings_.flag("hobbit.pack") || host_; // reads do not land directly in the slot
    const uint64_t now       = hobbit_resident_memory();
    const uint64_t staging   = is_staged ? loader::staging_size(uint32_t(settings_.count("hobbit.io_threads"))) : 0;
    return { resident_before_,
             model_bytes + settings_.count("hobbit.further") + settings_.count("hobbit.requests"),
             staging,
             resident_before_ + now - std::min(now, resident_here_),
             hobbit_available_memory(),
             {},
             hobbit_memory_limit(),
             snapshot_,
             has_display() };
}

// Rows of one batch, and copies of routers, in host memory: the pools' own, or those of the CPU's share.
uint64_t hobbit_model::host_rows(uint32_t n_batch) const {
    if (!host_) {
        return engines_.front()->rows(n_batch);
    }
    const uint64_t n_used     = host_->demand(index_.layers()).n_used;
    const uint32_t n_together = std::max(n_batch, uint32_t(inner_graph::enough_rows));
    uint64_t       bytes      = 0;
    for (const auto & engine : engines_) {
        bytes += engine->n_layers() > 0 ? cpu_rows::size(index_, n_batch * n_used, n_together) : 0;
    }
    return bytes;
}

// Divides the limits on memory between the pools of all devices and of the cache in host memory behind them.
status hobbit_model::plan_slots(uint64_t model_bytes, uint32_t n_batch, model_slots & slots) const {
    HOBBIT_TRY(settings_.check_placed(host_ != nullptr, is_host_device(engines_.front()->device_)));
    const pool_demand         behind = host_ ? host_->demand(index_.layers()) : pool_demand();
    other_memory              other  = memory_beside(model_bytes);
    std::vector<device_share> devices;
    for (const auto & engine : engines_) {
        devices.push_back({ engine->demand(), engine->rows(n_batch) });
    }
    std::vector<budget> shared;
    HOBBIT_TRY(share_bounds(settings_.bounds(), devices, shared));
    other.scratch += host_rows(n_batch);
    for (size_t i = 0; i < engines_.size(); i++) {
        pool_plan here;
        if (engines_[i]->n_layers() > 0) {
            ggml_backend_dev_t device = engines_[i]->device_;
            other.device =
                host_ ? device_memory{ ggml_backend_dev_name(device), free_memory(device), devices[i].rows, behind }
                      : device_memory();
            HOBBIT_TRY(plan_pools(shared[i], devices[i].demand, other, here));
            slots.host           = here.n_host_slots; // each device has the same
            slots.snapshot_bytes = here.n_snapshots * other.snapshot;
        }
        slots.devices.push_back(here.n_slots);
    }
    return !host_ || count_of(slots.host[tier_id::high]) > 0 || settings_.mode() != compute_mode::cooperative
               ? status()
               : status::error("hobbit.mode=cooperative computes experts in host memory, which has no room for "
                               "them: give a larger --memory");
}

// Keeps what info() tells: a pool may have fewer slots than it was given.
status hobbit_model::keep_slots(model_slots slots) {
    for (const tier_id tier : index_.tiers()) {
        for (size_t i = 0; i < engines_.size(); i++) {
            HOBBIT_TRY(engines_[i]->cache_.fit(tier, slots.devices[i][tier]));
        }
        HOBBIT_TRY(host_ ? host_->fit(tier, slots.host[tier]) : status());
    }
    slots_ = std::move(slots);
    return {};
}

bool hobbit_plan_pools(hobbit_model * model, uint64_t model_bytes, uint32_t n_batch, struct hobbit_pool_plan * plan,
                       char * err, size_t err_size) {
    return report_call("cannot plan expert pools", err, err_size, [&]() -> status {
        mutex_lock lock(model->mutex_);
        GGML_ASSERT(!model->prepared_);
        *plan = { 0, model->host_rows(n_batch), 0, false, HOBBIT_SHORT_OF_NOTHING, 0 };
        hobbit_model::model_slots slots;
        for (const auto & engine : model->engines_) {
            const bool computes   = engine->n_layers() > 0;
            plan->batch_bytes    += model->host_ && computes ? engine->rows(n_batch) : 0;
            plan->prefetch_bytes += computes ? engine->predictor_bytes() : 0;
        }
        const status s = model->plan_slots(model_bytes, n_batch, slots);
        plan->shortage = hobbit_shortage(s.reason());
        plan->least    = s.least();
        HOBBIT_TRY(s);
        plan->holds_all = true;
        for (size_t i = 0; i < model->engines_.size(); i++) {
            const pool_demand        d     = model->engines_[i]->demand();
            const hobbit_device_info here  = model->engines_[i]->info(slots.devices[i]);
            plan->pool_bytes              += here.pool_bytes_high + here.pool_bytes_low;
            plan->holds_all = plan->holds_all && here.pool_slots_high >= count_of(d.all(tier_id::high)) &&
                              here.pool_slots_low >= d.n_absent;
        }
        return model->keep_slots(std::move(slots));
    });
}

//
// the first context
//

// Allocates a cache's pools for these layers. `where` names the memory in the log.
static status allocate_pools(expert_cache & cache, const std::vector<layer_id> & layers, const pool_slots & slots,
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

status hobbit_model::allocate_host(const pool_slots & slots) {
    const bool   is_locked = transfer_memory_ != ggml_backend_cpu_buffer_type();
    const char * where     = is_locked ? "the host, page-locked, behind it" : "the host, behind it";
    HOBBIT_TRY(allocate_pools(*host_, index_.layers(), slots, *policy_, where));
    for (const tier_id tier : index_.tiers()) {
        uint32_t n_above = 0;
        for (const auto & engine : engines_) {
            n_above += engine->cache_.n_slots(tier);
        }
        if (host_->n_slots(tier) <= n_above) {
            host_->make_exclusive(tier);
        }
    }
    if (host_->n_slots(tier_id::high) == 0) {
        GGML_LOG_WARN("hobbit: host memory has no room to cache experts: each miss on %s reads from disk; "
                      "give a larger --memory\n",
                      settings_.device().c_str());
    }
    return {};
}

// Plans and allocates all pools, and gives the CPU its share of the layers.
status hobbit_model::allocate(uint64_t model_bytes, uint32_t n_batch) {
    model_slots slots;
    HOBBIT_TRY(plan_slots(model_bytes, n_batch, slots));
    HOBBIT_TRY(keep_slots(slots));
    const bool shares = count_of(slots.host[tier_id::high]) > 0 && settings_.mode() != compute_mode::gpu;
    for (size_t i = 0; i < engines_.size(); i++) {
        if (shares && engines_[i]->n_layers() > 0) {
            engines_[i]->start_sharing();
        }
        device_engine & engine = *engines_[i];
        const char *    name   = ggml_backend_dev_name(engine.device_);
        HOBBIT_TRY(allocate_pools(engine.cache_, engine.layers_, slots.devices[i], *policy_, name));
        if (engine.n_layers() == 0) {
            GGML_LOG_WARN("hobbit: %s computes no layer with experts\n", name);
        }
    }
    return host_ ? allocate_host(slots.host) : status();
}

// Creates the executors and begins to fill the pools, in this order.
void hobbit_model::start() {
    if (const auto n_ahead = uint32_t(settings_.count("hobbit.prefetch")); n_ahead > 0 || passes_) {
        std::vector<prefetcher::layer_place> ahead;
        for (const uint32_t i : layer_engines_) {
            ahead.push_back({ &engines_[i]->cache_, engines_[i]->predictor_.get() });
        }
        prefetcher_ = std::make_unique<prefetcher>(index_, ahead, n_ahead, registered_rule::make(rule()),
                                                   run_->thresholds, run_->batch, stats_);
        prefetcher_->set_trials(settings_.flag("hobbit.prefetch_trials"));
    }
    for (const auto & engine : engines_) {
        engine->start(prefetcher_.get(), *run_);
    }
    fill(most_used(use_rates(index_)));
}

// Preloads the experts that a calibration used most, in idle time, so that the first tokens hit. Host memory gets those
// for which the devices have no slots. The first computation waits for the devices' part; see compute().
void hobbit_model::fill(const std::vector<expert_id> & most_used) {
    for (const tier_id tier : index_.tiers()) {
        for (const auto & engine : engines_) {
            engine->fill(tier, most_used);
        }
    }
    is_filling_ = host_ != nullptr;
    for (const tier_id tier : host_ ? index_.tiers() : std::vector<tier_id>()) {
        std::vector<expert_id> rest         = most_used;
        const auto             is_on_device = [&](expert_id id) {
            return !host_->holds(id, tier, {}) && std::any_of(engines_.begin(), engines_.end(), [&](const auto & e) {
                return e->cache_.holds(id, tier, {});
            });
        };
        rest.erase(std::remove_if(rest.begin(), rest.end(), is_on_device), rest.end());
        host_->fill(tier, rest);
    }
}

//
// contexts
//

// The pools have taken what the first context left of the memory.
status hobbit_model::check_further_context(uint64_t model_bytes) const {
    if (settings_.memory() == 0 || settings_.count("hobbit.further") > 0 ||
        (contexts_.empty() && model_bytes <= model_bytes_)) {
        return {};
    }
    return status::error("hobbit.memory was divided when '%s' got its first context, and has no room for %s: give "
                         "hobbit.pools in its place, which limits the expert cache alone",
                         index_.files()[0].c_str(), contexts_.empty() ? "a larger one" : "a second one");
}

status hobbit_model::prepare(uint64_t model_bytes, uint32_t n_batch) {
    HOBBIT_TRY(reader_.check_in_place()); // llama.cpp has read the other weights since
    HOBBIT_TRY(allocate(model_bytes, n_batch));
    // opened late: a model that cannot run leaves an older trace alone
    if (const std::string & trace = settings_.text("hobbit.trace"); !trace.empty()) {
        HOBBIT_TRY(trace_.open(trace, index_));
    }
    if (const std::string & timeline = settings_.text("hobbit.timeline"); !timeline.empty()) {
        HOBBIT_TRY(stats_.events.open(timeline));
    }
    start();
    start_sequence(0); // llama.cpp may not say which sequences it computes
    set_reporting();
    prepared_    = true;
    model_bytes_ = model_bytes;
    return {};
}

bool hobbit_open_context(hobbit_model * model, uint64_t model_bytes, uint32_t n_batch, hobbit_context ** context,
                         char * err, size_t err_size) {
    *context = nullptr;
    return report_call("cannot allocate expert pools", err, err_size, [&]() -> status {
        mutex_lock lock(model->mutex_);
        HOBBIT_TRY(model->prepared_ ? model->check_further_context(model_bytes) : model->prepare(model_bytes, n_batch));
        int32_t number = 0;
        while (model->contexts_.count(number) > 0) {
            number++;
        }
        std::unique_ptr<hobbit_context> opened(new hobbit_context{ model, number });
        model->contexts_.insert(number);
        model->ref();
        *context = opened.release();
        return {};
    });
}

void hobbit_close_context(hobbit_context * context) {
    if (!context) {
        return;
    }
    hobbit_model & m = *context->model;
    {
        mutex_lock lock(m.mutex_);
        if (m.holder_ == context) {
            m.release();
        }
        m.run_->thresholds.clear(context->global(0), context->global(hobbit_context::MAX_SEQUENCES));
        m.contexts_.erase(context->number);
    }
    delete context;
    m.unref();
}
