// SPDX-License-Identifier: MIT
#include "hobbit.h"

#include "base/status.h"
#include "engine/hobbit-model.h"
#include "model/expert-index.h"
#include "model/gguf-file.h"

#include <algorithm>
#include <cstdio>

using namespace hobbit;

// The value of a function that has no error of its own; `otherwise` where memory runs out.
template <typename T, typename F>
static T value_or(T otherwise, F function) noexcept {
    try {
        return function();
    } catch (const std::exception &) {
        return otherwise;
    }
}

bool hobbit_open(const char * path, const struct hobbit_setting * settings, size_t n_settings, hobbit_model ** model,
                 char * err, size_t err_size) {
    *model = nullptr;
    std::unique_ptr<hobbit_model> opened;
    const bool                    ok = report_call("cannot open the model", err, err_size,
                                                   [&] { return hobbit_model::open(path, settings, n_settings, opened); });
    *model                           = opened.release();
    return ok;
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
    return value_or(false, [&] { return model->owns(name); });
}

size_t hobbit_first_part(const char * path, char * first, size_t size) {
    const auto copy = [&](const char * file) { return size_t(std::max(0, snprintf(first, size, "%s", file))); };
    return value_or(copy(path), [&] { return copy(hobbit::first_part(path).c_str()); });
}

uint64_t hobbit_request_bytes(uint64_t n_ctx, uint64_t memory, bool has_media) {
    // tools or a large photograph, and tokens with 6 bytes
    const uint64_t wanted = std::max<uint64_t>(has_media ? 256 << 20 : 32 << 20, 1024 * n_ctx);
    return (memory == 0 ? wanted : std::min(wanted, memory / (has_media ? 12 : 24))) / 2 * 3;
}

bool hobbit_is_tier_tensor(const char * name) {
    return value_or(false, [&] { return hobbit::is_tier_tensor(name); });
}

void hobbit_set_experts_used(hobbit_model * model, const uint32_t * of_blocks, size_t n_blocks) {
    model->guard([&] { model->index_.set_experts_used(of_blocks, n_blocks); });
}

void hobbit_set_run_blocks(hobbit_model * model, uint32_t n_blocks) {
    model->guard([&] { model->index_.set_run_blocks(n_blocks); });
}

bool hobbit_place_layers(hobbit_model * model, struct ggml_backend_device * const * devices, size_t n_devices,
                         bool can_repeat, char * err, size_t err_size) {
    return report_call("cannot place the layers", err, err_size,
                       [&] { return model->place_layers(devices, n_devices, can_repeat); });
}

struct ggml_backend_buffer_type * hobbit_buffer_type(hobbit_model * model, int32_t block) {
    return &model->engine_of(block).buffer_type_;
}

struct ggml_backend_buffer_type * hobbit_device_buffer_type(hobbit_model * model, int32_t block) {
    return ggml_backend_dev_buffer_type(hobbit_buffer_type(model, block)->device);
}

void hobbit_set_snapshot_size(hobbit_model * model, uint64_t bytes) {
    model->snapshot_ = bytes;
}

size_t hobbit_check_header(const char * path, const char * data, size_t n_data, uint64_t size,
                           enum hobbit_header_fault * fault, char * err, size_t err_size) {
    gguf_file         file;
    ggml_log_callback log  = nullptr;
    void *            user = nullptr;
    ggml_log_get(&log, &user);
    *fault = HOBBIT_HEADER_NOT_READ;                                    // where memory runs out
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr); // the sentence says it
    const bool ok = report_call("cannot read the header", err, err_size, [&] {
        status s = file.open(path, { data, n_data }, size);
        *fault   = hobbit_header_fault(s.reason());
        return s;
    });
    ggml_log_set(log, user);
    return ok ? file.header_bytes() : 0;
}

bool hobbit_check_limit(uint64_t memory, char * err, size_t err_size) {
    budget b;
    b.memory = memory;
    return report_call("cannot check a limit", err, err_size,
                       [&] { return check_limit(b, true, 0, hobbit_memory_limit()); });
}

//
// settings and counters
//

struct hobbit_precision hobbit_full_precision(void) {
    return rule_numbers().c();
}

bool hobbit_precision_covers(struct hobbit_precision a, struct hobbit_precision b) {
    return rule_numbers(a).covers(rule_numbers(b));
}

struct hobbit_precision hobbit_lower_precision(struct hobbit_precision a, struct hobbit_precision b) {
    return rule_numbers::lower(rule_numbers(a), rule_numbers(b)).c();
}

bool hobbit_set_costs(hobbit_model * model, const float * low, const float * skip, size_t n, char * err,
                      size_t err_size) {
    return report_call("cannot keep the costs", err, err_size,
                       [&] { return model->set_costs({ low, low + n }, { skip, skip + n }); });
}

void hobbit_get_info(const hobbit_model * model, struct hobbit_info * info) {
    *info = model->info();
}

void hobbit_get_counters(const hobbit_model * model, double * values, size_t n_values) {
    for (size_t i = 0; i < n_values && hobbit_counter_at(i); i++) {
        values[i] = model->stats_.value(i);
    }
}
