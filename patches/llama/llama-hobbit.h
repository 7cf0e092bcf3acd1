// SPDX-License-Identifier: MIT
#pragma once

// The bridge between llama.cpp and the expert cache: the patches call these functions. They have no effect on a model
// that is opened without a cache.

#include "ggml-backend.h"

#include <memory>
#include <string>

// only declared: a change of hobbit.h does not recompile every model
struct hobbit_model;

struct llama_context;
struct llama_model;
struct llama_model_loader;
struct llama_model_params;
struct llama_ubatch;

struct llama_hobbit_deleter {
    void operator()(hobbit_model * model) const;
};

using llama_hobbit_ptr = std::unique_ptr<hobbit_model, llama_hobbit_deleter>;

// While one exists, a check of llama.cpp's or ggml's own that fails in its thread throws std::runtime_error in place of
// ending the process: a damaged header is an error of its model alone. For code that the caller leaves by an exception
// anyway where a model cannot be used. Other threads end the process as ever.
class llama_hobbit_guard {
  public:
    llama_hobbit_guard();
    ~llama_hobbit_guard();

    llama_hobbit_guard(const llama_hobbit_guard &)             = delete;
    llama_hobbit_guard & operator=(const llama_hobbit_guard &) = delete;
};

//
// Model. Functions that can fail throw std::runtime_error.
//

// Opens the expert cache of the file, or returns null where llama.cpp loads the file as usual. Every key-value override
// whose key starts with "hobbit." is a setting of the cache. With a cache, params.load_mode becomes one without
// mapping.
llama_hobbit_ptr llama_hobbit_open(const std::string & fname, llama_model_params & params);

// Lets the loader use the cache, which may be null. Removes the tensors of further tiers from the loader, because no
// architecture creates them.
void llama_hobbit_attach(llama_model_loader & ml, hobbit_model * model);

// Tells the cache which device has which layer.
void llama_hobbit_place_layers(const llama_model & lm);

// The buffer type that the cache chooses for a weight used by `op`, null where it chooses none.
ggml_backend_buffer_type_t llama_hobbit_buft(hobbit_model * model, ggml_op op, const std::string & name, int block);

// Whether the tensor's data stays on disk.
bool llama_hobbit_is_remote(const ggml_tensor * tensor);

// Throws where the file has further tiers, which a quantized copy would take from another model.
void llama_hobbit_refuse_tiers(const llama_model_loader & ml);

//
// Context
//

// Makes the router's weights and its input sources of the layer's matrix products over experts in the cache, which
// ranks by the weights and predicts with the input. `weights` is older than these products, and only the product with
// `down_exps` does not need the input. As sources they stay intact until the products are computed.
void llama_hobbit_attach_router(ggml_context * ctx, ggml_tensor * weights, ggml_tensor * input,
                                const ggml_tensor * down_exps);

// Refuses a graph that the CPU would end the process for. Hands over the routers, then sizes the pools. REQUIRES:
// weights, KV cache and compute buffers are allocated.
void llama_hobbit_prepare(const llama_context & lctx);

// The context ends; its memory is free for the next one.
void llama_hobbit_end_context(const llama_model & lm);

// Announces the tokens that are about to be computed: records of use are kept by sequence. `is_decoded`: decode()
// computes them, which repeats a draft.
void llama_hobbit_begin_batch(const llama_model & lm, const llama_ubatch & ubatch, bool is_decoded);

// Whether the tokens that were just computed are a draft whose logits ask for a second pass. The logits may be null.
bool llama_hobbit_repeats_batch(const llama_model & lm, ggml_backend_sched_t sched, const ggml_tensor * logits);
