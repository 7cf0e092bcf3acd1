// SPDX-License-Identifier: MIT
//
// hobbit: bounded expert caches for Mixture-of-Experts models on any ggml device (HOBBIT, arXiv 2411.01433).
//
// Conventions
//   - C, opaque handles, sized integers. No exception crosses this interface.
//   - A function that can fail returns false or NULL and writes one sentence, with what to do about it, to `err`
//     (truncated to `err_size`, always terminated). The most recent such sentence of the process is also kept for
//     hobbit_last_error.
//   - Sizes are bytes. Times are seconds.
//   - Every function may be called from any thread.
//   - The cffi declarations of the Python package are generated from this file: keep declarations to plain C.

#ifndef HOBBIT_H
#define HOBBIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef HOBBIT_BUILD
#define HOBBIT_API __attribute__((visibility("default")))
#else
#define HOBBIT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// The routed experts of one opened GGUF model: where they lie, their pools and their counters. Reference counted.
typedef struct hobbit_model hobbit_model;

struct ggml_backend_buffer_type;

//
// Opening
//

enum hobbit_setting_kind {
    HOBBIT_SETTING_INT    = 0,
    HOBBIT_SETTING_FLOAT  = 1,
    HOBBIT_SETTING_BOOL   = 2,
    HOBBIT_SETTING_STRING = 3,
};

// One setting. Keys are spelled as in the GGUF metadata and on the command line of llama.cpp's tools
// (--override-kv KEY=TYPE:VALUE); a setting given here wins over the same key stored in the model file.
//
//   hobbit.enable        bool    keep a plain GGUF's experts in the cache (a file with tiers always is)
//   hobbit.memory        int     bound on the whole process; 0: computed from what is free
//   hobbit.pools         int     bytes of the expert pools alone; overrides hobbit.memory
//   hobbit.low_share     float   share of the pools that holds the low tier; default follows from t1 and t2
//   hobbit.t1 hobbit.t2  float   thresholds of Eq. 2 on the summed, normalised gate weights: s <= t1 high precision,
//                                t1 < s <= t2 low, above t2 skipped; default 1 and 1, everything high
//   hobbit.io_threads    int     number of loader threads
//   hobbit.sidecar       string  file with the further tiers; default MODEL.hobbit.gguf where it exists
//   hobbit.tag           int     number under which hobbit_find finds the model
struct hobbit_setting {
    const char *             key;
    enum hobbit_setting_kind kind;
    int64_t                  i; // INT, BOOL
    double                   f; // FLOAT
    const char *             s; // STRING, borrowed for the call
};

// Opens the experts of the GGUF at `path` (of a split model: its first file), without reading any weight.
// On success *model holds one reference, or NULL where llama.cpp is to load the file as it always does: a dense model,
// or a plain GGUF for which no cache was asked and which fits into free memory.
HOBBIT_API bool hobbit_open(const char * path, const struct hobbit_setting * settings, size_t n_settings,
                            hobbit_model ** model, char * err, size_t err_size);

HOBBIT_API void hobbit_ref(hobbit_model * model);

// Drops one reference; the last one joins the loader threads and frees the pools. NULL is ignored.
HOBBIT_API void hobbit_unref(hobbit_model * model);

// The open model with this hobbit.tag, with a new reference, or NULL.
HOBBIT_API hobbit_model * hobbit_find(int64_t tag);

// Copies the most recent error sentence of the process; returns its length, 0 when there was none.
HOBBIT_API size_t hobbit_last_error(char * err, size_t err_size);

HOBBIT_API void hobbit_clear_last_error(void);

//
// For the model loader
//

// Whether the tensor holds routed experts that the cache serves: the loader gives it hobbit_buffer_type and reads
// nothing.
HOBBIT_API bool hobbit_owns_tensor(const hobbit_model * model, const char * name);

// Whether the tensor belongs to a further tier, which no architecture of llama.cpp knows.
HOBBIT_API bool hobbit_is_tier_tensor(const char * name);

// Hands out addresses without memory. Valid while the model has a reference; every buffer of the type holds one.
HOBBIT_API struct ggml_backend_buffer_type * hobbit_buffer_type(hobbit_model * model);

// Allocates the pools; a second call changes nothing. `model_bytes` is what the model holds in host memory beside them:
// non-expert weights, KV cache and compute buffers. `n_batch` is the largest number of tokens computed at once.
// Fails when the budget is below the smallest that works, which the message states.
HOBBIT_API bool hobbit_prepare(hobbit_model * model, uint64_t model_bytes, uint32_t n_batch, char * err,
                               size_t err_size);

//
// Observing
//

struct hobbit_info {
    uint32_t n_layers;       // layers with routed experts
    uint32_t n_experts;      // per layer, the largest
    uint32_t n_experts_used; // per token
    uint32_t n_tiers;
    uint64_t tier_bytes_high; // all routed experts of the tier
    uint64_t tier_bytes_low;
    uint64_t pool_bytes_high; // 0 before hobbit_prepare
    uint64_t pool_bytes_low;
    uint32_t pool_slots_high; // experts that fit
    uint32_t pool_slots_low;
    double   t1;
    double   t2;
    bool     direct_io; // false: the file system refused O_DIRECT
};

HOBBIT_API void hobbit_get_info(const hobbit_model * model, struct hobbit_info * info);

// Counters since opening. A selection is one (token, expert) pair chosen by a router; hits and misses count the experts
// that a layer needed for one batch, once each.
struct hobbit_stats {
    uint64_t selections_high;
    uint64_t selections_low;
    uint64_t selections_skipped;
    uint64_t hits_high;
    uint64_t misses_high;
    uint64_t hits_low;
    uint64_t misses_low;
    uint64_t evictions;
    uint64_t bytes_read;
    uint64_t layers_computed;
    uint64_t waves;   // more than layers_computed when a layer needed more experts than fit
    double   stall_s; // compute waiting for the disk
};

HOBBIT_API void hobbit_get_stats(const hobbit_model * model, struct hobbit_stats * stats);

#ifdef __cplusplus
}
#endif

#endif // HOBBIT_H
