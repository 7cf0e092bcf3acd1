// SPDX-License-Identifier: MIT
#include "engine/hobbit-model.h"

#include "device/device-traits.h"
#include "ggml-impl.h"
#include "plan/memory-budget.h"

#include <algorithm>
#include <chrono>

using namespace hobbit;

// Mean bits of a weight in the low tier, 0 without one.
static double low_bits(const expert_index & index) {
    double n_bytes = 0.0, n_weights = 1.0;
    index.each_matrix(tier_id::low, [&](expert_id id, part_id part, const part_location & at) {
        const matrix_shape & shape  = index.layer(id.layer).shapes[part];
        n_bytes                    += double(at.size);
        n_weights                  += double(shape.n_in * shape.n_out);
    });
    return 8.0 * n_bytes / n_weights;
}

// Refuses costs that were measured for another rule, and a rule that would be all high without a word.
static status check_costs(const std::string & path, const std::string & costs_rule, const settings & config) {
    const std::string & rule     = config.rule();
    const auto          is_given = [&](const char * key) { return config.is_given(key); };
    const bool is_exact = (is_given("hobbit.price") || is_given("hobbit.quality")) && config.thresholds().all_high();
    return !registered_rule::traits(rule).needs_costs || costs_rule == rule || is_exact
               ? status()
               : status::error("the rule %s needs the costs that a calibration measures, and '%s' has %s: run pyhobbit "
                               "calibrate --set rule=%s, or give t1 and t2",
                               rule.c_str(), path.c_str(),
                               costs_rule.empty() ? "none" : ("those of the rule " + costs_rule).c_str(), rule.c_str());
}

static status read_stored(const std::string & path, expert_index & index, settings & config) {
    const size_t n_in_model = index.stored().size();
    if (config.flag("hobbit.calibrated")) {
        HOBBIT_TRY(index.read_calibration(path));
    }
    status s = config.apply_stored(index.stored(), n_in_model);
    s        = s.ok() ? config.resolve_quality(low_bits(index)) : s;
    if (s.ok() && config.flag("hobbit.calibrated")) {
        return check_costs(path, index.calibration().costs_rule, config);
    }
    return s.ok() ? s
                  : status::error("the settings stored in '%s' or the calibration beside it cannot be used: %s",
                                  path.c_str(), s.message().c_str());
}

bool hobbit_resolve_settings(const char * path, const struct hobbit_setting * given, size_t n_given,
                             struct hobbit_resolved_setting * rows, size_t n_rows, char * err, size_t err_size) {
    return report_call("cannot resolve the settings", err, err_size, [&]() -> status {
        settings     config;
        expert_index index(settings::stored_keys());
        HOBBIT_TRY(config.apply(given, n_given));
        HOBBIT_TRY(path ? index.open(path, config.text("hobbit.sidecar")) : status());
        HOBBIT_TRY(index.n_layers() > 0 ? read_stored(path, index, config) : status());
        config.describe(rows, n_rows);
        return {};
    });
}

status hobbit_model::open(const std::string & path, const hobbit_setting * given, size_t n_given,
                          std::unique_ptr<hobbit_model> & model) {
    std::unique_ptr<hobbit_model> opened(new hobbit_model);
    opened->resident_here_ = hobbit_resident_memory();

    HOBBIT_TRY(opened->settings_.apply(given, n_given));
    const uint64_t process   = opened->settings_.count("hobbit.process");
    opened->resident_before_ = process > 0 ? process : opened->resident_here_;
    HOBBIT_TRY(opened->index_.open(path, opened->settings_.text("hobbit.sidecar")));

    const expert_index & index = opened->index_;
    const bool           asked = opened->settings_.asked();
    if (index.n_layers() == 0) {
        if (asked) {
            GGML_LOG_WARN("hobbit: '%s' has no routed experts: it runs as in stock llama.cpp\n", path.c_str());
        }
        return {};
    }
    if (opened->settings_.text("hobbit.placement") == "layers") {
        return index.n_tiers() == 1
                   ? status()
                   : status::error("'%s' has a low tier, which needs the cache: leave hobbit.placement out",
                                   path.c_str());
    }
    if (index.n_tiers() == 1 && !asked) {
        if (index.model_bytes() + index.model_bytes() / 10 < hobbit_available_memory()) {
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
    HOBBIT_TRY(opened->check_numbers(opened->settings_.thresholds()));
    HOBBIT_TRY(find_compute_devices(opened->settings_.device(), named));
    if (!extra_type(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), "CPU_PLAIN_ROWS")) {
        return status::error("the CPU backend that was loaded is another llama.cpp's: remove it from the library path");
    }
    HOBBIT_TRY(opened->open_files());
    if (registered_policy::traits(opened->settings_.policy()).needs_prior && use_rates(index).empty()) {
        return status::error("hobbit.policy=%s keeps the experts that were used most before, and nothing is known of "
                             "'%s': run pyhobbit calibrate, or choose another policy",
                             opened->settings_.policy().c_str(), path.c_str());
    }
    opened->precision_ = text_of(opened->settings_.rule(), opened->settings_.thresholds());
    model              = std::move(opened);
    return {};
}

status hobbit_model::check_numbers(const rule_numbers & t) const {
    const bool needs_costs = registered_rule::traits(settings_.rule()).needs_costs;
    if (needs_costs && !t.all_high() && costs_.empty()) {
        return status::error("the rule %s needs the costs that a calibration measures, and '%s' has none: run pyhobbit "
                             "calibrate, or give t1 and t2",
                             settings_.rule().c_str(), index_.files()[0].c_str());
    }
    if (!needs_costs && asks_for_low(settings_.rule(), t) && index_.n_tiers() == 1) {
        const rule_number & lossy = *numbers_of(settings_.rule()).front();
        return status::error("%s = %g asks for low-precision experts, and '%s' has none: add them with pyhobbit "
                             "convert, or leave %s at %g",
                             lossy.spec.option, t[lossy], index_.files()[0].c_str(), lossy.spec.option, lossy.exact);
    }
    return {};
}

rule_options hobbit_model::rule() const {
    const auto mean = [&](tier_id tier) { return double(index_.tier_bytes(tier)) / std::max(1u, index_.n_held(tier)); };
    return { settings_.rule(), &costs_, mean(tier_id::low) / mean(tier_id::high) };
}

// An embedding that is not worth a read for every token.
static constexpr uint64_t SMALL_EMBEDDING = 16u << 20;

// Memory that a context, its buffers and the process may need beside a model.
static constexpr uint64_t ROOM_BESIDE_MODEL = 256u << 20;

// Returns true if some experts will, or may, have to be read again.
bool hobbit_model::memory_is_short(bool in_host) const {
    if (settings_.pools() > 0 && in_host) {
        return settings_.pools() < index_.tier_bytes(tier_id::high);
    }
    const uint64_t elsewhere = in_host ? 0 : std::min(index_.model_bytes(), index_.tier_bytes(tier_id::high));
    const uint64_t held      = index_.model_bytes() - elsewhere;
    const uint64_t budget = settings_.memory() > 0 ? settings_.memory() : resident_before_ + hobbit_available_memory();
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
    return {};
}

// All that depends on the devices.
void hobbit_model::build(const std::vector<ggml_backend_dev_t> & devices) {
    const embedding_table & embedding = index_.embedding();
    const auto              patience  = std::chrono::seconds(settings_.count("hobbit.read_timeout"));

    transfer_memory_     = find_pinned_memory(devices, reader_);
    const bool is_shared = devices.size() == 1 && shares_memory(devices.front(), transfer_memory_);
    const bool are_apart = !is_shared && !is_host_device(devices.front());
    if (are_apart && ggml_backend_dev_type(devices.front()) == GGML_BACKEND_DEVICE_TYPE_IGPU) {
        GGML_LOG_WARN("hobbit: %s reads no memory of the host in place: experts are copied, and lie in memory twice\n",
                      ggml_backend_dev_name(devices.front()));
    }
    stats_.layers = std::vector<hobbit::stats::layer_uses>(index_.n_layers());
    loader_ =
        std::make_unique<loader>(reader_, stats_, uint32_t(settings_.count("hobbit.io_threads")),
                                 are_apart ? devices : std::vector<ggml_backend_dev_t>(), transfer_memory_, patience);
    if (embedding.location.size >= SMALL_EMBEDDING && memory_is_short(!are_apart)) {
        rows_.emplace(reader_, embedding, patience);
    }
    if (are_apart) {
        expert_cache::pool_place in_host;
        in_host.memory = transfer_memory_;
        host_          = std::make_unique<expert_cache>(index_, *loader_, host_stats_, in_host);
    }
    for (ggml_backend_dev_t device : devices) {
        engines_.push_back(std::make_unique<device_engine>(*this, device));
    }
    slots_.devices.resize(engines_.size());

    policy_options options;
    options.name      = settings_.policy();
    options.weights   = settings_.weights();
    options.n_layers  = uint32_t(index_.n_layers());
    options.n_experts = index_.n_experts();
    options.n_used    = engines_.front()->demand().n_used;
    options.prior     = use_rates(index_);
    policy_           = registered_policy::make(options);
    rule_             = registered_rule::make(rule());
    const layer_step step(*rule_, *policy_, settings_.flag("hobbit.strict"));
    run_.reset(new run_state{ step, sequence_thresholds(settings_.thresholds()), {}, nullptr, passes_.get() });
}

hobbit_model::~hobbit_model() {
    char err[1024];
    if (!report_call("cannot complete the trace", err, sizeof(err), [&] { return trace_.close(); })) {
        GGML_LOG_ERROR("hobbit: %s\n", err);
    }
    if (!report_call("cannot complete the timeline", err, sizeof(err), [&] { return stats_.events.close(); })) {
        GGML_LOG_ERROR("hobbit: %s\n", err);
    }
}

//
// layers
//

static std::optional<layer_id> find_layer(const expert_index & index, int64_t block) {
    for (layer_id layer = 0; layer < index.n_layers(); layer++) {
        if (index.layer(layer).block == block) {
            return layer;
        }
    }
    return {};
}

device_engine & hobbit_model::engine_of(int64_t block) const {
    const auto layer = find_layer(index_, block);
    return *engines_[layer ? layer_engines_[*layer] : 0];
}

void hobbit_model::assign_layers(const std::vector<ggml_backend_dev_t> & of_layers) {
    std::vector<std::optional<uint32_t>> given(index_.n_layers());
    std::vector<uint64_t>                free;
    for (uint32_t i = 0; i < engines_.size(); i++) {
        free.push_back(engines_.size() > 1 ? free_memory(engines_[i]->device_) : 0);
        for (layer_id layer = 0; layer < index_.n_layers(); layer++) {
            if (of_layers[layer] == engines_[i]->device_) {
                given[layer] = i;
            }
        }
    }
    layer_engines_ = hobbit::assign_layers(given, free);
    for (layer_id layer = 0; layer < index_.n_layers(); layer++) {
        engines_[layer_engines_[layer]]->layers_.push_back(layer);
    }
}

status hobbit_model::place_layers(const ggml_backend_dev_t * devices, size_t n_devices, bool can_repeat) {
    mutex_lock lock(mutex_);
    GGML_ASSERT(!is_placed_);
    can_repeat_ = can_repeat;
    HOBBIT_TRY(check_passes(settings_.thresholds()));
    std::vector<ggml_backend_dev_t> of_layers;
    for (layer_id layer = 0; layer < index_.n_layers(); layer++) {
        const uint32_t block = index_.layer(layer).block;
        of_layers.push_back(block < n_devices ? devices[block] : nullptr);
    }
    if (settings_.device().empty()) {
        const std::string usable = usable_devices(of_layers);
        if (!usable.empty()) {
            HOBBIT_TRY(settings_.set("hobbit.device", usable, HOBBIT_SOURCE_COMPUTED, "as the other layers"));
        }
    }
    std::vector<ggml_backend_dev_t> own;
    HOBBIT_TRY(find_compute_devices(settings_.device(), own));
    build(own);
    // before weights are loaded
    HOBBIT_TRY(check_limit(settings_.bounds(), host_ != nullptr, 0, hobbit_memory_limit()));
    assign_layers(of_layers);
    is_placed_ = true;
    return {};
}

bool hobbit_set_router(hobbit_model * model, uint32_t block, const struct hobbit_router * router, char * err,
                       size_t err_size) {
    return report_call("cannot keep the routers for prefetch", err, err_size, [&]() -> status {
        mutex_lock lock(model->mutex_);
        const auto layer = find_layer(model->index_, block);
        for (size_t i = 0; i < model->engines_.size() && layer && !model->prepared_; i++) {
            device_engine & engine = *model->engines_[i];
            predictor *     ahead  = engine.predictor_.get();
            HOBBIT_TRY(ahead && engine.n_layers() > 0 ? ahead->set_router(*layer, *router) : status());
        }
        return {};
    });
}

//
// changing and observing
//

status hobbit_model::check_passes(const rule_numbers & t) const {
    return passes_ ? passes_->check(t, can_repeat_, index_.files()[0]) : status();
}

// `changed`: the settings with these changes, where they can be.
status hobbit_model::try_changes(const hobbit_setting * changes, size_t n_changes, settings & changed) const {
    changed = settings_;
    HOBBIT_TRY(changed.change(changes, n_changes));
    const rule_numbers t       = changed.thresholds();
    const auto         has_low = [](const auto & engine) { return engine->cache_.n_slots(tier_id::low) > 0; };
    if (prepared_ && asks_for_low(changed.rule(), t) && index_.n_tiers() > 1 &&
        std::none_of(engines_.begin(), engines_.end(), has_low)) {
        const std::string word  = changed.text(QUALITY);
        const std::string asked = word.empty() ? text_of(changed.rule(), t, "--set ", " ") : "--quality " + word;
        return status::error("no memory was set aside for the low tier: restart with %s", asked.c_str());
    }
    const auto judges = [](const hobbit_setting & each) {
        const rule_number * number = rule_number::find(each.key);
        return number && !number->asks_for_precision();
    };
    if (std::any_of(changes, changes + n_changes, judges)) {
        HOBBIT_TRY(check_passes(t));
    }
    return check_numbers(t);
}

status hobbit_model::set_costs(std::vector<float> low, std::vector<float> skip) {
    mutex_lock lock(mutex_);
    return costs_.set(std::move(low), std::move(skip), uint32_t(index_.n_layers()), index_.n_experts());
}

bool hobbit_change_settings(hobbit_model * model, const struct hobbit_setting * changes, size_t n_changes, char * err,
                            size_t err_size) {
    return report_call("cannot change the settings", err, err_size, [&]() -> status {
        mutex_lock lock(model->mutex_);
        settings   changed;
        HOBBIT_TRY(model->try_changes(changes, n_changes, changed));
        model->precision_ = text_of(changed.rule(), changed.thresholds());
        model->settings_  = changed;
        if (model->run_) {
            model->run_->thresholds.set(changed.thresholds());
        }
        return {};
    });
}

void hobbit_get_settings(const hobbit_model * model, struct hobbit_resolved_setting * rows, size_t n_rows) {
    std::fill_n(rows, n_rows, hobbit_resolved_setting{});
    try {
        mutex_lock lock(model->mutex_);
        model->settings_.describe(rows, n_rows);
    } catch (const std::exception &) {
        // they stay without values
    }
}

bool hobbit_model::end_reads() {
    const bool rows_end = !rows_ || rows_->end();
    return (!loader_ || loader_->end()) && rows_end;
}

void hobbit_model::unref() {
    // a child of fork() has no loader threads to join, and a read that hangs must not end in freed memory
    if (--n_references_ == 0 && opened_by_ == getpid() && end_reads()) {
        delete this;
    }
}

double hobbit_oldest_read(const hobbit_model * model) {
    if (!model->is_placed_) {
        return 0.0;
    }
    const auto of_rows = model->rows_ ? model->rows_->oldest_read() : std::chrono::milliseconds(0);
    return std::chrono::duration<double>(std::max(model->loader_->oldest_read(), of_rows)).count();
}

void hobbit_get_layer_uses(const hobbit_model * model, uint64_t * hits, uint64_t * misses, size_t n_layers) {
    const auto & layers  = model->stats_.layers;
    const size_t n_known = model->is_placed_ ? layers.size() : 0;
    for (size_t i = 0; i < n_layers; i++) {
        hits[i]   = i < n_known ? layers[i].hits.load() : 0;
        misses[i] = i < n_known ? layers[i].misses.load() : 0;
    }
}

bool hobbit_check(const hobbit_model * model, char * err, size_t err_size) {
    return report_call("cannot compute experts", err, err_size, [&] {
        mutex_lock lock(model->mutex_);
        return model->error_;
    });
}

void hobbit_set_observer(hobbit_model * model, hobbit_observer observer, void * user_data) {
    model->guard([&] {
        mutex_lock lock(model->mutex_);
        model->observer_ = { observer, user_data };
        if (model->run_) {
            model->set_reporting();
        }
    });
}

// Reports cost time: only where somebody listens. REQUIRES: the layers are placed
void hobbit_model::set_reporting() {
    run_->observer = nullptr;
    if (trace_.is_open() || observer_.call) {
        run_->observer = [this](const layer_report & r) {
            trace_.add(r);
            observer_.tell(r);
        };
    }
}

hobbit_info hobbit_model::info() const {
    mutex_lock lock(mutex_);

    hobbit_info i      = {};
    i.n_layers         = uint32_t(index_.n_layers());
    i.n_experts        = index_.n_experts();
    i.n_experts_used   = index_.n_experts_used();
    i.n_tiers          = index_.n_tiers();
    i.tier_bytes_high  = index_.tier_bytes(tier_id::high);
    i.tier_bytes_low   = index_.tier_bytes(tier_id::low);
    i.token_bytes_high = index_.token_bytes(tier_id::high);
    i.token_bytes_low  = index_.token_bytes(tier_id::low);
    i.direct_io        = reader_.direct_io();
    i.on_device        = host_ != nullptr;
    i.snapshot_bytes   = slots_.snapshot_bytes;
    precision_.copy(i.precision, sizeof(i.precision) - 1);
    for (layer_id l = 0; l < index_.n_layers(); l++) {
        const layer_shape & layer  = index_.layer(l);
        i.n_absent_high           += layer.n_experts - index_.n_held(tier_id::high, l, l);
        i.n_absent_low            += i.n_tiers > 1 ? layer.n_experts - index_.n_held(tier_id::low, l, l) : 0;
        i.n_run_layers            += layer.is_run;
        i.n_all_experts           += layer.is_run ? layer.n_experts : 0;
        i.n_token_uses            += layer.is_run ? layer.n_used : 0;
    }
    for (size_t e = 0; e < engines_.size(); e++) {
        const hobbit_device_info here  = engines_[e]->info(slots_.devices[e]);
        i.pool_slots_high             += here.pool_slots_high;
        i.pool_slots_low              += here.pool_slots_low;
        i.pool_bytes_high             += here.pool_bytes_high;
        i.pool_bytes_low              += here.pool_bytes_low;
    }
    if (host_) {
        i.host_slots_high = count_of(slots_.host[tier_id::high]);
        i.host_slots_low  = count_of(slots_.host[tier_id::low]);
        i.host_bytes_high = host_->bytes(tier_id::high, slots_.host[tier_id::high]);
        i.host_bytes_low  = host_->bytes(tier_id::low, slots_.host[tier_id::low]);
    }
    return i;
}

bool hobbit_get_device(const hobbit_model * model, size_t i, struct hobbit_device_info * info) {
    mutex_lock lock(model->mutex_);
    if (i >= model->engines_.size()) {
        return false;
    }
    *info = model->engines_[i]->info(model->slots_.devices[i]);
    return true;
}

bool hobbit_get_latency(const hobbit_model * model, size_t device, size_t i, struct hobbit_latency * latency) {
    try {
        mutex_lock   lock(model->mutex_);
        const auto * share = device < model->engines_.size() ? model->engines_[device]->share_.get() : nullptr;
        const auto   all   = share ? share->latencies() : std::vector<hobbit_latency>();
        if (i < all.size()) {
            *latency = all[i];
        }
        return i < all.size();
    } catch (const std::exception &) {
        return false;
    }
}
