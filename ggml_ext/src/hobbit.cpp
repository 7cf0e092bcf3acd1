// SPDX-License-Identifier: MIT
#include "hobbit.h"

#include "hobbit-model.h"
#include "last-error.h"

#include <cstdio>
#include <exception>
#include <map>
#include <mutex>

using hobbit::status;
using hobbit::TIER_HIGH;
using hobbit::TIER_LOW;

//
// errors
//

static std::mutex  g_error_mutex;
static std::string g_error; // guarded by g_error_mutex

void hobbit::set_last_error(const std::string & message) {
    std::lock_guard<std::mutex> lock(g_error_mutex);
    g_error = message;
}

// Writes the outcome to err; true where it is a success.
static bool report(const status & s, char * err, size_t err_size) {
    if (!s.ok()) {
        hobbit::set_last_error(s.message());
        snprintf(err, err_size, "%s", s.message().c_str());
    }
    return s.ok();
}

size_t hobbit_last_error(char * err, size_t err_size) {
    std::lock_guard<std::mutex> lock(g_error_mutex);
    snprintf(err, err_size, "%s", g_error.c_str());
    return g_error.size();
}

void hobbit_clear_last_error(void) {
    hobbit::set_last_error("");
}

//
// references
//

static std::mutex                        g_models_mutex;
static std::map<int64_t, hobbit_model *> g_models; // by tag, without references; guarded by g_models_mutex

bool hobbit_open(const char * path, const struct hobbit_setting * settings, size_t n_settings, hobbit_model ** model,
                 char * err, size_t err_size) {
    *model = nullptr;
    std::unique_ptr<hobbit_model> opened;
    status                        s;
    try {
        s = hobbit_model::open(path, settings, n_settings, opened);
    } catch (const std::exception & e) {
        s = status::error(hobbit::format("cannot open '%s': %s", path, e.what()));
    }
    if (opened && opened->config().tag != 0) {
        std::lock_guard<std::mutex> lock(g_models_mutex);
        g_models[opened->config().tag] = opened.get();
    }
    *model = opened.release();
    return report(s, err, err_size);
}

void hobbit_ref(hobbit_model * model) {
    model->n_references++;
}

void hobbit_unref(hobbit_model * model) {
    if (!model) {
        return;
    }
    {
        std::lock_guard<std::mutex> lock(g_models_mutex);
        if (--model->n_references > 0) {
            return;
        }
        const auto it = g_models.find(model->config().tag);
        if (it != g_models.end() && it->second == model) {
            g_models.erase(it);
        }
    }
    delete model;
}

hobbit_model * hobbit_find(int64_t tag) {
    std::lock_guard<std::mutex> lock(g_models_mutex);
    const auto                  it = g_models.find(tag);
    if (it == g_models.end()) {
        return nullptr;
    }
    it->second->n_references++;
    return it->second;
}

//
// for the model loader
//

bool hobbit_owns_tensor(const hobbit_model * model, const char * name) {
    return model->index().find_tensor(name) != nullptr;
}

bool hobbit_is_tier_tensor(const char * name) {
    return hobbit::expert_index::is_tier_tensor(name);
}

struct ggml_backend_buffer_type * hobbit_buffer_type(hobbit_model * model) {
    return model->buffer_type();
}

bool hobbit_prepare(hobbit_model * model, uint64_t model_bytes, uint32_t n_batch, char * err, size_t err_size) {
    status s;
    try {
        s = model->prepare(model_bytes, n_batch);
    } catch (const std::exception & e) {
        s = status::error(hobbit::format("cannot allocate expert pools: %s", e.what()));
    }
    return report(s, err, err_size);
}

//
// observing
//

void hobbit_get_info(const hobbit_model * model, struct hobbit_info * info) {
    *info = model->info();
}

void hobbit_get_stats(const hobbit_model * model, struct hobbit_stats * out) {
    const hobbit::stats & s = model->counters();
    out->selections_high    = s.selections[TIER_HIGH];
    out->selections_low     = s.selections[TIER_LOW];
    out->selections_skipped = s.selections_skipped;
    out->hits_high          = s.hits[TIER_HIGH];
    out->misses_high        = s.misses[TIER_HIGH];
    out->hits_low           = s.hits[TIER_LOW];
    out->misses_low         = s.misses[TIER_LOW];
    out->evictions          = s.evictions;
    out->bytes_read         = s.bytes_read;
    out->layers_computed    = s.layers_computed;
    out->waves              = s.waves;
    out->stall_s            = double(s.stall_ns) * 1e-9;
}
