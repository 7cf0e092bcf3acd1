// SPDX-License-Identifier: MIT
#include "engine/hobbit-model.h"

#include "base/last-error.h"
#include "base/memory-turn.h"
#include "base/system-memory.h"
#include "device/compute-device.h"
#include "device/device-traits.h"
#include "ggml-impl.h"
#include "io/pinned-memory.h"

#include <algorithm>
#include <chrono>

using namespace hobbit;

static status read_stored(const std::string & path, expert_index & index, settings & config) {
    const size_t n_in_model = index.stored().size();
    if (config.calibrated) {
        HOBBIT_TRY(index.read_calibration(path));
    }
    const status s = config.apply_stored(index.stored(), n_in_model);
    return s.ok() ? s
                  : status::error("the settings stored in '%s' or the calibration beside it cannot be used: %s",
                                  path.c_str(), s.message().c_str());
}

status hobbit_model::resolve(const char * path, const hobbit_setting * given, size_t n_given,
                             hobbit_resolved_setting * rows, size_t n_rows) {
    settings     config;
    expert_index index(settings::stored_keys());
    HOBBIT_TRY(config.apply(given, n_given));
    HOBBIT_TRY(path ? index.open(path, config.sidecar) : status());
    HOBBIT_TRY(index.n_layers() > 0 ? read_stored(path, index, config) : status());
    config.describe(rows, n_rows, index.kind(tier_id::high) == tier_kind::residual);
    return {};
}

status hobbit_model::open(const std::string & path, const hobbit_setting * given, size_t n_given,
                          std::unique_ptr<hobbit_model> & model) {
    std::unique_ptr<hobbit_model> opened(new hobbit_model);
    opened->resident_before_ = resident_memory();

    HOBBIT_TRY(opened->settings_.apply(given, n_given));
    HOBBIT_TRY(opened->index_.open(path, opened->settings_.sidecar));

    const expert_index & index = opened->index_;
    const bool           asked = opened->settings_.asked();
    if (index.n_layers() == 0) {
        if (asked) {
            GGML_LOG_WARN("hobbit: '%s' has no routed experts: it runs as in stock llama.cpp\n", path.c_str());
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
    HOBBIT_TRY(read_stored(path, opened->index_, opened->settings_));
    status s = index.calibration().low_costs.empty()
                   ? status()
                   : opened->set_costs(index.calibration().low_costs, index.calibration().skip_costs);
    if (!s.ok()) {
        return status::error("the calibration of '%s' cannot be used: %s; calibrate it again", path.c_str(),
                             s.message().c_str());
    }
    std::vector<ggml_backend_dev_t> named;
    HOBBIT_TRY(opened->check_thresholds(opened->settings_.thresholds));
    HOBBIT_TRY(find_compute_devices(opened->settings_.device, named));
    HOBBIT_TRY(opened->open_files());
    opened->history_.recall(path, opened->settings_.remember);
    if (needs_prior(opened->settings_.policy) && opened->history_.rates().empty()) {
        return status::error("hobbit.policy=%s keeps the experts that were used most before, and nothing is known of "
                             "'%s': run pyhobbit calibrate, or choose another policy",
                             opened->settings_.policy.c_str(), path.c_str());
    }
    model = std::move(opened);
    return {};
}

status hobbit_model::check_thresholds(const score_thresholds & t) const {
    if (t.t1 < 1.0 && t.t2 > t.t1 && index_.n_tiers() == 1) {
        return status::error("t1 = %g asks for low-precision experts, and '%s' has none: add them with "
                             "pyhobbit convert, or leave t1 at 1",
                             t.t1, index_.files()[0].c_str());
    }
    if (t.price > 0.0 && costs_.empty()) {
        return status::error("the rule %s needs the costs that a calibration measures, and '%s' has none: run pyhobbit "
                             "calibrate, or give t1 and t2",
                             settings_.rule.c_str(), index_.files()[0].c_str());
    }
    return {};
}

rule_options hobbit_model::rule() const {
    const auto kind  = index_.kind(tier_id::high);
    uint64_t   n_all = 0;
    for (layer_id layer = 0; layer < index_.n_layers(); layer++) {
        n_all += index_.layer(layer).n_experts;
    }
    // means of an expert
    const double low  = double(index_.term_bytes(term_id::low)) / double(n_all);
    const double high = double(index_.term_bytes(term_id::high)) / double(n_all - index_.n_absent_high());
    return { settings_.rule, &costs_, low / (kind == tier_kind::residual ? high + low : high), kind };
}

// An embedding that is not worth a read for every token.
static constexpr uint64_t SMALL_EMBEDDING = 16u << 20;

// What a context, its buffers and the process may take beside a model.
static constexpr uint64_t ROOM_BESIDE_MODEL = 256u << 20;

// Whether some experts will, or may, have to be read again.
bool hobbit_model::memory_is_short(bool in_host) const {
    if (settings_.pools > 0 && in_host) {
        return settings_.pools < index_.term_bytes(term_id::high);
    }
    const uint64_t elsewhere = in_host ? 0 : std::min(index_.model_bytes(), index_.term_bytes(term_id::high));
    const uint64_t held      = index_.model_bytes() - elsewhere;
    const uint64_t budget    = settings_.memory > 0 ? settings_.memory : resident_before_ + available_memory();
    return budget < resident_before_ + held + held / 10 + ROOM_BESIDE_MODEL;
}

bool hobbit_model::owns(const std::string & tensor) const {
    return index_.find_tensor(tensor) || (rows_ && tensor == embedding_table::name);
}

status hobbit_model::open_files() {
    for (const std::string & file : index_.files()) {
        HOBBIT_TRY(reader_.open(file));
    }
    if (!reader_.direct_io()) {
        GGML_LOG_WARN("hobbit: the file system of '%s' has no direct I/O: reads go through the page cache\n",
                      index_.files()[0].c_str());
    }
    if (!index_.uses_base_experts()) {
        GGML_LOG_INFO("hobbit: the experts of '%s' are not read: the tiers of '%s' replace them\n",
                      index_.files().front().c_str(), index_.files().back().c_str());
    }
    return {};
}

// All that depends on the devices.
void hobbit_model::build(const std::vector<ggml_backend_dev_t> & devices) {
    const bool              are_apart = !is_host_device(devices.front());
    const embedding_table & embedding = index_.embedding();
    const auto              patience  = std::chrono::seconds(settings_.read_timeout);
    const auto              memory    = find_pinned_memory(devices, reader_);
    stats_.layers                     = std::vector<hobbit::stats::layer_uses>(index_.n_layers());
    loader_ = std::make_unique<loader>(reader_, stats_, settings_.io_threads, devices, memory, patience);
    if (embedding.location.size >= SMALL_EMBEDDING && memory_is_short(!are_apart)) {
        rows_.emplace(reader_, embedding, patience);
    }
    places_ = std::make_unique<device_engines>(this, devices, index_, settings_, *loader_, stats_, memory);

    policy_options options;
    options.name      = settings_.policy;
    options.weights   = settings_.weights;
    options.n_layers  = uint32_t(index_.n_layers());
    options.n_experts = index_.n_experts();
    options.n_used    = places_->all().front()->demand().n_used;

    options.prior = history_.rates();
    options.terms = index_.terms();
    policy_       = make_policy(options);
    rule_         = make_rule(rule());
    const layer_step step(*rule_, *policy_, settings_.strict);
    run_.reset(new run_state{ step, sequence_thresholds(settings_.thresholds), {}, history_.none() });
}

hobbit_model::~hobbit_model() {
    char err[1024];
    if (run_) {
        guard([&] { history_.remember(run_->uses); });
    }
    if (!report_call("cannot complete the trace", err, sizeof(err), [&] { return recorder_.close(); })) {
        GGML_LOG_ERROR("hobbit: %s\n", err);
    }
}

status hobbit_model::place_layers(const ggml_backend_dev_t * devices, size_t n_devices) {
    std::lock_guard<std::mutex> lock(mutex_);
    GGML_ASSERT(!places_);
    if (settings_.device.empty()) {
        std::vector<ggml_backend_dev_t> of_layers;
        for (layer_id layer = 0; layer < index_.n_layers(); layer++) {
            const uint32_t block = index_.layer(layer).block;
            of_layers.push_back(block < n_devices ? devices[block] : nullptr);
        }
        const std::string usable = usable_devices(of_layers);
        if (!usable.empty()) {
            settings_.compute("hobbit.device", usable, "as the other layers");
        }
    }
    std::vector<ggml_backend_dev_t> own;
    HOBBIT_TRY(find_compute_devices(settings_.device, own));
    build(own);
    places_->place_layers(devices, n_devices);
    return {};
}

status hobbit_model::set_router(uint32_t block, const ggml_tensor * weight, const ggml_tensor * bias,
                                const ggml_tensor * selection_bias, hobbit_gating gating) {
    std::lock_guard<std::mutex> lock(mutex_);
    return prepared_ ? status() : places_->set_router(block, weight, bias, selection_bias, gating);
}

// Of host memory, where what is read is not read in place.
uint64_t hobbit_model::staging_bytes() const {
    const bool is_used = settings_.pack || places_->are_apart();
    return is_used ? loader::staging_size(settings_.io_threads) : 0;
}

other_memory hobbit_model::memory_beside(uint64_t model_bytes) const {
    return { resident_before_, model_bytes, staging_bytes(), resident_memory(), available_memory(), {} };
}

status hobbit_model::plan(uint64_t model_bytes, uint32_t n_batch, hobbit_pool_plan & plan) {
    std::lock_guard<std::mutex> lock(mutex_);
    GGML_ASSERT(!prepared_);
    HOBBIT_TRY(settings_.check_placed(places_->are_apart()));
    return places_->plan(memory_beside(model_bytes), n_batch, plan);
}

// How long another program may take to fill its memory.
static constexpr auto TURN_PATIENCE = std::chrono::seconds(60);

status hobbit_model::prepare(uint64_t model_bytes, uint32_t n_batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (prepared_) {
        HOBBIT_TRY(check_further_context(model_bytes));
        n_contexts_++;
        return {};
    }
    HOBBIT_TRY(settings_.check_placed(places_->are_apart()));
    HOBBIT_TRY(reader_.check_in_place()); // llama.cpp has read the other weights since
    const bool takes_free = settings_.spare_memory() > 0;
    const auto turn = takes_free ? memory_turn::take(TURN_PATIENCE, true) : nullptr; // page_commit goes on with it
    HOBBIT_TRY(places_->allocate(memory_beside(model_bytes), n_batch, *policy_));
    if (!settings_.trace.empty()) { // not before: a model that cannot run leaves an older trace alone
        HOBBIT_TRY(recorder_.open_trace(settings_.trace, index_));
    }
    places_->start(*run_, rule(), most_used(history_.rates()));
    start_sequence(0); // where llama.cpp does not say which sequences it computes
    set_reporting();
    prepared_    = true;
    model_bytes_ = model_bytes;
    n_contexts_  = 1;
    return {};
}

// The pools have taken what the first context left of the memory.
status hobbit_model::check_further_context(uint64_t model_bytes) const {
    if (settings_.memory == 0 || (n_contexts_ == 0 && model_bytes <= model_bytes_)) {
        return {};
    }
    return status::error("hobbit.memory was divided when '%s' got its first context, and has no room for %s: give "
                         "hobbit.pools in its place, which limits the expert cache alone",
                         index_.files()[0].c_str(), n_contexts_ > 0 ? "a second one" : "a larger one");
}

void hobbit_model::end_context() {
    std::lock_guard<std::mutex> lock(mutex_);
    n_contexts_ -= n_contexts_ > 0;
}

bool hobbit_model::end_reads() {
    const bool rows_end = !rows_ || rows_->end();
    return (!loader_ || loader_->end()) && rows_end;
}

double hobbit_model::oldest_read() const {
    const auto no_time = std::chrono::milliseconds(0);
    const auto oldest  = std::max(loader_ ? loader_->oldest_read() : no_time, rows_ ? rows_->oldest_read() : no_time);
    return std::chrono::duration<double>(oldest).count();
}

// Keeps the error of a computation. REQUIRES: the mutex is held
template <typename F>
status hobbit_model::run(F computation) {
    status s;
    try {
        s = computation();
        if (!s.is_aborted()) {
            error_ = s;
        }
    } catch (const std::exception &) { // no part of the engine is in a state to go on
        keep_no_memory();
        return error_;
    }
    return s;
}

// Allocates nothing. REQUIRES: the mutex is held
void hobbit_model::keep_no_memory() {
    if (error_.ok()) {
        error_ = std::move(no_memory_);
    }
}

status hobbit_model::compute(ggml_cgraph * graph, ggml_backend_dev_t device, inner_graph & inner, inner_graph * cpu) {
    std::lock_guard<std::mutex> lock(mutex_);
    GGML_ASSERT(prepared_);
    if (!error_.ok()) {
        return error_;
    }
    const auto   start  = std::chrono::steady_clock::now();
    const status s      = run([&] {
        const status computed = places_->compute(graph, device, inner, cpu);
        return computed.ok() ? recorder_.error() : computed;
    });
    stats_.compute_ns  += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    return s;
}

status hobbit_model::look_up(ggml_tensor * lookup) {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_.ok() ? run([&] { return rows_->compute(lookup); }) : error_;
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
    run_->thresholds.clear(sequence);
}

void hobbit_model::begin_batch(uint32_t n_tokens, const int32_t * sequences, const int32_t * positions,
                               const int8_t * outputs, bool can_repeat) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint32_t i = 0; i < n_tokens; i++) {
        if (positions[i] == 0) {
            start_sequence(sequences[i]);
        }
    }
    batch_info & batch = run_->batch;
    batch.begin(n_tokens, sequences, positions, outputs);
    for (const auto & [sequence, n] : batch.sequences()) {
        policy_->begin_tokens(uint32_t(sequence), n);
    }
    run_->passes.begin(batch, run_->thresholds, can_repeat);
    recorder_.begin_batch(batch);
}

bool hobbit_model::is_draft() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return run_ && run_->batch.pass() == batch_pass::draft;
}

bool hobbit_model::repeats_batch(const float * logits, uint32_t n_vocab) {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t              n_unsure  = run_->passes.judge(run_->batch, run_->thresholds, logits, n_vocab);
    stats_.tokens_repeated               += n_unsure;
    if (n_unsure == 0) {
        count_selections(run_->passes.counts(), stats_);
    }
    return n_unsure > 0;
}

status hobbit_model::refuse_confidence() {
    std::lock_guard<std::mutex> lock(mutex_);
    can_repeat_ = false;
    return check_confidence(settings_.thresholds);
}

status hobbit_model::check_confidence(const score_thresholds & t) const {
    if (t.confidence > 0.0 && !can_repeat_) {
        return status::error("a confidence computes tokens a second time, and layers of '%s' keep a state that only "
                             "one pass may change: run this model with confidence = 0",
                             index_.files()[0].c_str());
    }
    return {};
}

status hobbit_model::set_prediction(given_routing given) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto                  is_unknown = [&](int32_t e) { return e < 0 || uint32_t(e) >= index_.n_experts(); };
    if (std::any_of(given.experts.begin(), given.experts.end(), is_unknown)) {
        return status::error("a prediction names an expert that the model does not have");
    }
    GGML_ASSERT(places_);
    places_->set_prediction(std::move(given));
    return {};
}

//
// changing and observing
//

// `changed`: the settings with these changes, where they can be.
status hobbit_model::try_changes(const hobbit_setting * changes, size_t n_changes, settings & changed) const {
    changed = settings_;
    HOBBIT_TRY(changed.change(changes, n_changes));
    const score_thresholds & t            = changed.thresholds;
    const bool               asks_for_low = t.price > 0.0 || (t.t1 < 1.0 && t.t2 > t.t1);
    if (prepared_ && asks_for_low && index_.n_tiers() > 1 && !places_->has_low_pool()) {
        const std::string asked = t.price > 0.0 ? format("price = %g", t.price) : format("t1 = %g", t.t1);
        return status::error("%s asks for low-precision experts, and the model was opened without a pool for "
                             "them: open it with %s",
                             asked.c_str(), t.price > 0.0 ? "a price above 0" : "t1 below 1");
    }
    HOBBIT_TRY(check_confidence(t));
    return check_thresholds(t);
}

status hobbit_model::set_costs(std::vector<float> low, std::vector<float> skip) {
    std::lock_guard<std::mutex> lock(mutex_);
    return costs_.set(std::move(low), std::move(skip), uint32_t(index_.n_layers()), index_.n_experts());
}

status hobbit_model::change_settings(const hobbit_setting * changes, size_t n_changes) {
    std::lock_guard<std::mutex> lock(mutex_);
    settings                    changed;
    HOBBIT_TRY(try_changes(changes, n_changes, changed));
    settings_ = changed;
    if (run_) {
        run_->thresholds.set(settings_.thresholds);
    }
    return {};
}

status hobbit_model::change_settings(int32_t sequence, const hobbit_setting * changes, size_t n_changes) {
    std::lock_guard<std::mutex> lock(mutex_);
    GGML_ASSERT(prepared_);
    settings changed;
    HOBBIT_TRY(try_changes(changes, n_changes, changed));
    run_->thresholds.set(sequence, changed.thresholds);
    return {};
}

hobbit_precision hobbit_model::precision(int32_t sequence) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const score_thresholds &    t = run_ ? run_->thresholds.own(sequence) : settings_.thresholds;
    return { t.t1, t.t2, t.price };
}

void hobbit_model::describe_settings(hobbit_resolved_setting * rows, size_t n_rows) const {
    std::lock_guard<std::mutex> lock(mutex_);
    settings_.describe(rows, n_rows, index_.kind(tier_id::high) == tier_kind::residual);
}

status hobbit_model::check() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
}

void hobbit_model::set_observer(hobbit_observer observer, void * user_data) {
    std::lock_guard<std::mutex> lock(mutex_);
    recorder_.set_observer(observer, user_data);
    if (run_) {
        set_reporting();
    }
}

// Reports cost time: only where somebody listens. REQUIRES: the layers are placed
void hobbit_model::set_reporting() {
    run_->observer = nullptr;
    if (recorder_.is_listening()) {
        run_->observer = [this](const layer_report & r) { recorder_.record(r); };
    }
}

hobbit_info hobbit_model::info() const {
    std::lock_guard<std::mutex> lock(mutex_);
    hobbit_info                 i = {};
    i.n_layers                    = uint32_t(index_.n_layers());
    i.n_experts                   = index_.n_experts();
    i.n_experts_used              = index_.n_experts_used();
    i.n_tiers                     = index_.n_tiers();
    i.tier_bytes_high             = index_.term_bytes(term_id::high);
    i.tier_bytes_low              = index_.term_bytes(term_id::low);
    i.t1                          = settings_.thresholds.t1;
    i.t2                          = settings_.thresholds.t2;
    i.price                       = settings_.thresholds.price;
    i.direct_io                   = reader_.direct_io();
    i.high_is_residual            = index_.kind(tier_id::high) == tier_kind::residual;
    i.n_absent_high               = index_.n_absent_high();
    if (places_) {
        places_->describe(i);
    }
    return i;
}

bool hobbit_model::device_info(size_t i, hobbit_device_info & info) const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!places_ || i >= places_->all().size()) {
        return false;
    }
    info = places_->all()[i]->info();
    return true;
}

bool hobbit_model::latency(size_t device, size_t i, hobbit_latency & found) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto                  all = places_ && device < places_->all().size() ? places_->all()[device]->latencies()
                                                                                : std::vector<placement::latency>();
    if (i >= all.size()) {
        return false;
    }
    found = { all[i].bytes, all[i].n_rows, all[i].cpu, all[i].device, all[i].upload };
    return true;
}
