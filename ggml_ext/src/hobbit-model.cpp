// SPDX-License-Identifier: MIT
#include "hobbit-model.h"

#include "compute-device.h"
#include "ggml-hobbit.h"
#include "ggml-impl.h"
#include "last-error.h"
#include "latency-probe.h"
#include "memory.h"

#include <algorithm>
#include <chrono>

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
    if (opened->settings_.calibrated) {
        s = opened->index_.read_calibration(path);
    }
    if (!s.ok()) {
        return s;
    }
    s = opened->settings_.apply_stored(index.stored());
    if (!s.ok()) {
        return status::error(format("the settings stored in '%s' or the calibration beside it cannot be used: %s",
                                    path.c_str(), s.message().c_str()));
    }
    s = opened->start();
    if (s.ok()) {
        model = std::move(opened);
    }
    return s;
}

status hobbit_model::check_thresholds(const score_thresholds & t) const {
    if (t.t1 < 1.0 && t.t2 > t.t1 && index_.n_tiers() == 1) {
        return status::error(
            format("t1 = %g asks for low-precision experts, and '%s' has none: add them with pyhobbit convert, "
                   "or leave t1 at 1",
                   t.t1, index_.files()[0].c_str()));
    }
    return {};
}

// An embedding that is not worth a read for every token.
static constexpr uint64_t SMALL_EMBEDDING = 16u << 20;

// What a context, its buffers and the process may take beside a model.
static constexpr uint64_t ROOM_BESIDE_MODEL = 256u << 20;

// Whether some experts will, or may, have to be read again.
bool hobbit_model::memory_is_short() const {
    const bool in_host = is_host_device(device_);
    if (settings_.pools > 0 && in_host) {
        return settings_.pools < index_.tier_bytes(TIER_HIGH);
    }
    const uint64_t elsewhere = in_host ? 0 : std::min(index_.model_bytes(), index_.tier_bytes(TIER_HIGH));
    const uint64_t held      = index_.model_bytes() - elsewhere;
    const uint64_t budget    = settings_.memory > 0 ? settings_.memory : resident_before_ + available_memory();
    return budget < resident_before_ + held + held / 10 + ROOM_BESIDE_MODEL;
}

bool hobbit_model::owns(const std::string & tensor) const {
    return index_.find_tensor(tensor) || (rows_ && tensor == embedding_table::name);
}

status hobbit_model::start() {
    status s = check_thresholds(settings_.thresholds);
    s        = s.ok() ? find_compute_device(settings_.device, device_) : s;
    if (s.ok() && settings_.device_memory > 0 && is_host_device(device_)) {
        s = status::error(
            "hobbit.device_memory bounds a device that has memory of its own: name one with hobbit.device");
    }
    if (s.ok() && settings_.names_mode() && is_host_device(device_)) {
        s = status::error("hobbit.mode says who computes beside a device with memory of its own: name one with "
                          "hobbit.device");
    }
    for (size_t i = 0; i < index_.files().size() && s.ok(); i++) {
        s = reader_.open(index_.files()[i]);
    }
    if (!s.ok()) {
        return s;
    }
    if (!reader_.direct_io()) {
        GGML_LOG_WARN("hobbit: the file system of '%s' has no direct I/O: reads go through the page cache\n",
                      index_.files()[0].c_str());
    }
    const embedding_table & embedding = index_.embedding();
    if (embedding.location.size >= SMALL_EMBEDDING && memory_is_short()) {
        rows_.emplace(reader_, embedding);
    }
    if (!index_.uses_base_experts()) {
        GGML_LOG_INFO("hobbit: the experts of '%s' are not read: both tiers of '%s' stand for them\n",
                      index_.files().front().c_str(), index_.files().back().c_str());
    }
    buffer_type_ = ggml_backend_hobbit_make_buffer_type(this, ggml_backend_hobbit_register(device_));

    loader_ = std::make_unique<loader>(reader_, stats_, settings_.io_threads);
    if (!is_host_device(device_)) {
        host_ = std::make_unique<expert_cache>(index_, *loader_, host_stats_, expert_cache::pool_place());
    }
    const expert_cache::pool_place place = { device_, settings_.pack && !host_, host_.get() };
    cache_                               = std::make_unique<expert_cache>(index_, *loader_, stats_, place);

    policy_options options;
    options.name      = settings_.policy;
    options.weights   = settings_.weights;
    options.n_layers  = uint32_t(index_.n_layers());
    options.n_experts = index_.n_experts();
    options.n_used    = demand(*cache_).n_used;

    options.high_is_residual = index_.high_is_residual();
    policy_                  = make_policy(options);
    if (settings_.prefetch > 0) {
        predictor_ = std::make_unique<predictor>(index_, ggml_backend_dev_buffer_type(device_));
    }
    return {};
}

hobbit_model::~hobbit_model() {
    const status s = recorder_.close();
    if (!s.ok()) {
        set_last_error(s.message());
        GGML_LOG_ERROR("hobbit: %s\n", s.message().c_str());
    }
}

status hobbit_model::set_router(uint32_t block, const ggml_tensor * weight, const ggml_tensor * bias,
                                const ggml_tensor * selection_bias, hobbit_gating gating) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!predictor_ || prepared_) {
        return {};
    }
    for (uint32_t layer = 0; layer < index_.n_layers(); layer++) {
        if (index_.layer(layer).block == block) {
            return predictor_->set_router(layer, weight, bias, selection_bias, gating);
        }
    }
    return {};
}

pool_demand hobbit_model::demand(const expert_cache & cache) const {
    pool_demand d;
    for (uint32_t tier = 0; tier < index_.n_tiers(); tier++) {
        d.slot_size[tier] = cache.slot_size(tier);
    }
    for (size_t i = 0; i < index_.n_layers(); i++) {
        d.n_experts += index_.layer(i).n_experts;
    }
    d.n_used           = std::max(1u, std::min(index_.n_experts_used(), index_.n_experts()));
    d.high_is_residual = index_.high_is_residual();
    return d;
}

// Of the compute device's memory.
uint64_t hobbit_model::row_bytes(uint32_t n_batch) const {
    int64_t n_in  = 0;
    int64_t n_out = 0;
    for (size_t i = 0; i < index_.n_layers(); i++) {
        for (const matrix_shape & shape : index_.layer(i).shapes) {
            n_in  = std::max(n_in, shape.n_in);
            n_out = std::max(n_out, shape.n_out);
        }
    }
    n_out                 *= int64_t(index_.terms(TIER_HIGH).size()); // a sum's second product has a place of its own
    const uint64_t n_rows  = std::max(n_batch, uint32_t(inner_graph::enough_rows));
    return uint64_t(n_in + n_out) * sizeof(float) * n_rows + inner_graph::max_work_size;
}

// Of host memory, where what is read is not read in place.
uint64_t hobbit_model::staging_bytes() const {
    const bool is_used = settings_.pack || !is_host_device(device_);
    return is_used ? loader::staging_size(settings_.io_threads) : 0;
}

status hobbit_model::plan_memory(uint64_t model_bytes, uint32_t n_batch, pool_plan & plan) const {
    const uint64_t rows = row_bytes(n_batch) + (predictor_ ? predictor_->bytes() : 0);
    other_memory other  = { resident_before_, model_bytes, staging_bytes(), resident_memory(), available_memory(), {} };
    if (!host_) {
        other.scratch += rows;
        return plan_pools(settings_, demand(*cache_), other, plan);
    }
    const uint64_t n_rows  = uint64_t(n_batch) * demand(*host_).n_used;
    other.scratch         += host_rows::size(index_, n_rows, std::max(n_batch, uint32_t(inner_graph::enough_rows)));
    size_t free            = 0;
    size_t total           = 0;
    ggml_backend_dev_memory(device_, &free, &total);
    other.device = { ggml_backend_dev_name(device_), free, rows, demand(*host_).slot_size };
    for (uint32_t tier = 0; tier < index_.n_tiers(); tier++) {
        other.device.rows += cache_->overhead(tier);
    }
    return plan_pools(settings_, demand(*cache_), other, plan);
}

status hobbit_model::prepare(uint64_t model_bytes, uint32_t n_batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (prepared_) {
        return {};
    }
    pool_plan plan;
    status    s = plan_memory(model_bytes, n_batch, plan);
    if (s.ok() && host_) { // measures with memory that the pools take then
        s = start_sharing(plan.n_host_slots);
    }
    if (s.ok()) {
        s = allocate_pools(*cache_, plan.n_slots, ggml_backend_dev_name(device_));
    }
    if (s.ok() && host_) {
        s = allocate_pools(*host_, plan.n_host_slots, "the host, behind it");
    }
    if (s.ok() && host_ && host_->n_slots(TIER_HIGH) == 0) {
        GGML_LOG_WARN("hobbit: host memory has no room to cache experts: what %s does not hold is read from disk each "
                      "time; give a larger --memory\n",
                      ggml_backend_dev_name(device_));
    }
    if (s.ok() && !settings_.trace.empty()) { // not before: a model that cannot run leaves an older trace alone
        s = recorder_.open_trace(settings_.trace, index_);
    }
    if (!s.ok()) {
        return s;
    }
    if (predictor_) {
        prefetcher_ = std::make_unique<prefetcher>(index_, *cache_, *predictor_, settings_.prefetch,
                                                   settings_.thresholds, stats_);
    }
    moe_executor::config config;
    config.rules       = { settings_.thresholds, settings_.strict, settings_.random, plan.n_slots[TIER_LOW] > 0 };
    config.renormalize = settings_.renormalize;
    executor_ =
        std::make_unique<moe_executor>(index_, *cache_, *policy_, prefetcher_.get(), share_.get(), config, stats_);
    fill_pools();
    start_sequence(0); // where llama.cpp does not say which sequences it computes
    set_reporting();
    prepared_ = true;
    return {};
}

status hobbit_model::start_sharing(const pool_slots & host_slots) {
    if (host_slots[TIER_HIGH] == 0) {
        return settings_.mode != compute_mode::cooperative
                   ? status()
                   : status::error("hobbit.mode=cooperative computes experts in host memory, which has no room for "
                                   "them: give a larger --memory");
    }
    kinds_.emplace(index_);
    measured_latencies seeds;
    const status       s = measure_latencies(*kinds_, device_, seeds);
    if (s.ok()) {
        const cost_model costs(seeds.kinds, seeds.transfer_per_byte, settings_.mode);
        share_ = std::make_unique<cpu_share>(index_, *cache_, *host_, *kinds_, costs, stats_);
    }
    return s;
}

status hobbit_model::allocate_pools(expert_cache & cache, const pool_slots & slots, const char * where) {
    const pool_demand wanted = demand(cache);
    for (uint32_t tier = 0; tier < index_.n_tiers(); tier++) {
        if (slots[tier] == 0) {
            continue;
        }
        const uint32_t floor = even_floor(slots[tier], uint32_t(index_.n_layers()), wanted.n_used);
        const status   s     = cache.allocate(tier, slots[tier], floor, *policy_);
        if (!s.ok()) {
            return s;
        }
        const bool     is_residual = tier == TIER_HIGH && index_.high_is_residual();
        const uint32_t n_slots     = cache.n_slots(tier);
        GGML_LOG_INFO("hobbit: %s-precision pool of %u of %u %s, %s on %s\n", tier_name(tier), n_slots,
                      wanted.n_experts, is_residual ? "residuals" : "experts",
                      format_size(double(n_slots) * double(wanted.slot_size[tier])).c_str(), where);
    }
    return {};
}

// What was used most in calibration is read while nothing else is to be done: the first tokens find it.
void hobbit_model::fill_pools() {
    cache_->fill(index_.most_used());
    if (host_) {
        host_->fill(index_.most_used());
    }
}

status hobbit_model::compute(ggml_cgraph * graph, inner_graph & inner, inner_graph * cpu) {
    std::lock_guard<std::mutex> lock(mutex_);
    GGML_ASSERT(prepared_);
    if (!error_.ok()) {
        return error_;
    }
    const auto start   = std::chrono::steady_clock::now();
    status     s       = executor_->compute(graph, inner, cpu);
    stats_.compute_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    if (s.ok()) {
        s = recorder_.error();
    }
    keep_error(s);
    return s;
}

status hobbit_model::look_up(ggml_tensor * lookup) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_.ok()) {
        error_ = rows_->compute(lookup);
    }
    return error_;
}

void hobbit_model::keep_error(const status & s) {
    if (!s.is_aborted()) {
        error_ = s;
    }
}

//
// sequences
//

void hobbit_model::start_sequence(int32_t sequence) {
    policy_->begin_sequence(uint32_t(sequence));
    recorder_.begin_sequence(sequence);
}

void hobbit_model::begin_sequence(int32_t sequence) {
    std::lock_guard<std::mutex> lock(mutex_);
    start_sequence(sequence);
    if (executor_) {
        executor_->clear_thresholds(sequence);
    }
}

void hobbit_model::begin_batch(uint32_t n_tokens, const int32_t * sequences, const int32_t * positions,
                               const int8_t * outputs) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint32_t i = 0; i < n_tokens; i++) {
        if (positions[i] == 0) {
            start_sequence(sequences[i]);
        }
    }
    batch_info batch;
    batch.begin(n_tokens, sequences, positions, outputs);
    for (const auto & [sequence, n] : batch.sequences()) {
        policy_->begin_tokens(uint32_t(sequence), n);
    }
    recorder_.begin_batch(batch);
    if (executor_) {
        executor_->begin_batch(batch);
    }
}

//
// changing and observing
//

// `changed`: the settings with these thresholds, where they can be.
status hobbit_model::change_thresholds(double t1, double t2, settings & changed) const {
    changed                      = settings_;
    const hobbit_setting given[] = {
        { "hobbit.t1", HOBBIT_SETTING_FLOAT, 0, t1, nullptr },
        { "hobbit.t2", HOBBIT_SETTING_FLOAT, 0, t2, nullptr },
    };
    status s = changed.apply(given, 2);
    if (!s.ok()) {
        return s;
    }
    if (prepared_ && t1 < 1.0 && t2 > t1 && cache_->n_slots(TIER_LOW) == 0) {
        return status::error(
            format("t1 = %g asks for low-precision experts, and the model was opened without a pool for "
                   "them: open it with t1 below 1",
                   t1));
    }
    return check_thresholds(changed.thresholds);
}

status hobbit_model::set_thresholds(double t1, double t2) {
    std::lock_guard<std::mutex> lock(mutex_);
    settings                    changed;
    const status                s = change_thresholds(t1, t2, changed);
    if (!s.ok()) {
        return s;
    }
    settings_ = changed;
    if (executor_) {
        executor_->set_thresholds(settings_.thresholds);
    }
    if (prefetcher_) {
        prefetcher_->set_thresholds(settings_.thresholds);
    }
    return {};
}

status hobbit_model::set_sequence_thresholds(int32_t sequence, double t1, double t2) {
    std::lock_guard<std::mutex> lock(mutex_);
    GGML_ASSERT(prepared_);
    settings     changed;
    const status s = change_thresholds(t1, t2, changed);
    if (s.ok()) {
        executor_->set_thresholds(sequence, changed.thresholds);
    }
    return s;
}

status hobbit_model::check() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
}

void hobbit_model::set_observer(hobbit_observer observer, void * user_data) {
    std::lock_guard<std::mutex> lock(mutex_);
    recorder_.set_observer(observer, user_data);
    set_reporting();
}

// Reports cost time: only where somebody listens.
void hobbit_model::set_reporting() {
    if (!executor_) {
        return;
    }
    executor_->set_observer(recorder_.is_listening() ? [this](const layer_report & r) { recorder_.record(r); }
                                                     : std::function<void(const layer_report &)>());
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
    if (host_) {
        i.host_slots_high = host_->n_slots(TIER_HIGH);
        i.host_slots_low  = host_->n_slots(TIER_LOW);
        i.host_bytes_high = i.host_slots_high * host_->slot_size(TIER_HIGH);
        i.host_bytes_low  = i.host_slots_low * host_->slot_size(TIER_LOW);
    }
    i.t1               = settings_.thresholds.t1;
    i.t2               = settings_.thresholds.t2;
    i.direct_io        = reader_.direct_io();
    i.high_is_residual = index_.high_is_residual();
    i.on_device        = host_ != nullptr;
    return i;
}
