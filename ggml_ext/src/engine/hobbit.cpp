// SPDX-License-Identifier: MIT
#include "hobbit.h"

#include "base/last-error.h"
#include "engine/hobbit-model.h"
#include "model/tensor-names.h"

using hobbit::report;
using hobbit::report_call;
using hobbit::tier_id;

//
// references
//

bool hobbit_open(const char * path, const struct hobbit_setting * settings, size_t n_settings, hobbit_model ** model,
                 char * err, size_t err_size) {
    *model = nullptr;
    std::unique_ptr<hobbit_model> opened;
    const bool                    ok = report_call("cannot open the model", err, err_size,
                                                   [&] { return hobbit_model::open(path, settings, n_settings, opened); });
    *model                           = opened.release();
    return ok;
}

void hobbit_model::ref() {
    n_references_++;
}

void hobbit_model::unref() {
    // a child of fork() has no loader threads to join, and a read that hangs must not end in freed memory
    if (--n_references_ == 0 && opened_by_ == getpid() && end_reads()) {
        delete this;
    }
}

void hobbit_ref(hobbit_model * model) {
    model->ref();
}

void hobbit_unref(hobbit_model * model) {
    if (model) {
        model->unref();
    }
}

//
// for the model loader
//

bool hobbit_owns_tensor(const hobbit_model * model, const char * name) {
    return model->owns(name);
}

bool hobbit_is_tier_tensor(const char * name) {
    return hobbit::is_tier_tensor(name);
}

bool hobbit_place_layers(hobbit_model * model, struct ggml_backend_device * const * devices, size_t n_devices,
                         char * err, size_t err_size) {
    return report_call("cannot place the layers", err, err_size,
                       [&] { return model->place_layers(devices, n_devices); });
}

struct ggml_backend_buffer_type * hobbit_buffer_type(hobbit_model * model, int32_t block) {
    return model->buffer_type(block);
}

struct ggml_backend_buffer_type * hobbit_device_buffer_type(hobbit_model * model, int32_t block) {
    return ggml_backend_dev_buffer_type(model->buffer_type(block)->device);
}

bool hobbit_set_router(hobbit_model * model, uint32_t block, const struct ggml_tensor * weight,
                       const struct ggml_tensor * bias, const struct ggml_tensor * selection_bias,
                       enum hobbit_gating gating, char * err, size_t err_size) {
    return report_call("cannot keep the routers for prefetch", err, err_size,
                       [&] { return model->set_router(block, weight, bias, selection_bias, gating); });
}

bool hobbit_prepare(hobbit_model * model, uint64_t model_bytes, uint32_t n_batch, char * err, size_t err_size) {
    return report_call("cannot allocate expert pools", err, err_size,
                       [&] { return model->prepare(model_bytes, n_batch); });
}

void hobbit_end_context(hobbit_model * model) {
    model->end_context();
}

bool hobbit_plan_pools(hobbit_model * model, uint64_t model_bytes, uint32_t n_batch, struct hobbit_pool_plan * plan,
                       char * err, size_t err_size) {
    return report_call("cannot plan expert pools", err, err_size,
                       [&] { return model->plan(model_bytes, n_batch, *plan); });
}

//
// for the context
//

void hobbit_begin_batch(hobbit_model * model, uint32_t n_tokens, const int32_t * sequences, const int32_t * positions,
                        const int8_t * outputs, bool can_repeat) {
    model->guard([&] { model->begin_batch(n_tokens, sequences, positions, outputs, can_repeat); });
}

bool hobbit_is_draft(const hobbit_model * model) {
    return model->is_draft();
}

bool hobbit_repeats_batch(hobbit_model * model, const float * logits, uint32_t n_vocab) {
    bool repeats = false;
    model->guard([&] { repeats = model->repeats_batch(logits, n_vocab); });
    return repeats;
}

bool hobbit_refuse_confidence(hobbit_model * model, char * err, size_t err_size) {
    return report_call("cannot compute tokens twice", err, err_size, [&] { return model->refuse_confidence(); });
}

void hobbit_begin_sequence(hobbit_model * model, int32_t sequence) {
    model->guard([&] { model->begin_sequence(sequence); });
}

bool hobbit_set_prediction(hobbit_model * model, uint32_t n_tokens, uint32_t n_ahead, const int32_t * experts,
                           const float * weights, char * err, size_t err_size) {
    const hobbit::expert_index & index  = model->index();
    const size_t                 n_used = index.n_experts_used();
    const size_t                 n      = size_t(n_ahead) * n_tokens * size_t(index.n_layers()) * n_used;
    return report_call("cannot keep the prediction", err, err_size, [&] {
        return model->set_prediction(
            { n_tokens, int64_t(n_used), n_ahead, { experts, experts + n }, { weights, weights + n } });
    });
}

//
// changing and observing
//

bool hobbit_change_settings(hobbit_model * model, const struct hobbit_setting * changes, size_t n_changes, char * err,
                            size_t err_size) {
    return report_call("cannot change the settings", err, err_size,
                       [&] { return model->change_settings(changes, n_changes); });
}

bool hobbit_change_sequence_settings(hobbit_model * model, int32_t sequence, const struct hobbit_setting * changes,
                                     size_t n_changes, char * err, size_t err_size) {
    return report_call("cannot change the settings", err, err_size,
                       [&] { return model->change_settings(sequence, changes, n_changes); });
}

struct hobbit_precision hobbit_sequence_precision(const hobbit_model * model, int32_t sequence) {
    return model->precision(sequence);
}

static hobbit::score_thresholds thresholds_of(const struct hobbit_precision & p) {
    return { p.t1, p.t2, p.price };
}

bool hobbit_precision_covers(struct hobbit_precision a, struct hobbit_precision b) {
    return hobbit::covers(thresholds_of(a), thresholds_of(b));
}

struct hobbit_precision hobbit_lower_precision(struct hobbit_precision a, struct hobbit_precision b) {
    const hobbit::score_thresholds low = hobbit::lower(thresholds_of(a), thresholds_of(b));
    return { low.t1, low.t2, low.price };
}

bool hobbit_resolve_settings(const char * path, const struct hobbit_setting * settings, size_t n_settings,
                             struct hobbit_resolved_setting * rows, size_t n_rows, char * err, size_t err_size) {
    return report_call("cannot resolve the settings", err, err_size,
                       [&] { return hobbit_model::resolve(path, settings, n_settings, rows, n_rows); });
}

void hobbit_get_settings(const hobbit_model * model, struct hobbit_resolved_setting * rows, size_t n_rows) {
    model->describe_settings(rows, n_rows);
}

bool hobbit_set_costs(hobbit_model * model, const float * low, const float * skip, size_t n, char * err,
                      size_t err_size) {
    return report_call("cannot keep the costs", err, err_size,
                       [&] { return model->set_costs({ low, low + n }, { skip, skip + n }); });
}

bool hobbit_check(const hobbit_model * model, char * err, size_t err_size) {
    return report_call("cannot compute experts", err, err_size, [&] { return model->check(); });
}

void hobbit_set_observer(hobbit_model * model, hobbit_observer observer, void * user_data) {
    model->guard([&] { model->set_observer(observer, user_data); });
}

double hobbit_oldest_read(const hobbit_model * model) {
    return model->oldest_read();
}

void hobbit_get_info(const hobbit_model * model, struct hobbit_info * info) {
    *info = model->info();
}

bool hobbit_get_device(const hobbit_model * model, size_t i, struct hobbit_device_info * info) {
    return model->device_info(i, *info);
}

bool hobbit_get_latency(const hobbit_model * model, size_t device, size_t i, struct hobbit_latency * latency) {
    return model->latency(device, i, *latency);
}

void hobbit_get_counters(const hobbit_model * model, double * values, size_t n_values) {
    for (size_t i = 0; i < n_values && hobbit_counter_at(i); i++) {
        values[i] = model->counters().value(i);
    }
}

void hobbit_get_layer_uses(const hobbit_model * model, uint64_t * hits, uint64_t * misses, size_t n_layers) {
    const auto & layers = model->counters().layers;
    for (size_t i = 0; i < n_layers; i++) {
        hits[i]   = i < layers.size() ? layers[i].hits.load() : 0;
        misses[i] = i < layers.size() ? layers[i].misses.load() : 0;
    }
}
