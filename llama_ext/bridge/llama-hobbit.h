// SPDX-License-Identifier: MIT
#pragma once

// The bridge between llama.cpp and the expert cache: the patches call these functions. They have no effect on a model
// that is opened without a cache.

#include "ggml-backend.h"

#include <memory>
#include <string>

// only declared: a change of hobbit.h does not recompile every model
struct hobbit_context;
struct hobbit_model;

struct llama_context;
struct llama_context_params;
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
// anyway where a model cannot be used. It has ended before our code allocates pools or computes. ggml holds no lock
// where it checks what a header can damage, and its C sources are compiled so that exceptions pass through. Other
// threads end the process as ever.
class llama_hobbit_guard {
  public:
    llama_hobbit_guard();
    ~llama_hobbit_guard();

    llama_hobbit_guard(const llama_hobbit_guard &) = delete;
};

// Begins the sentence on a model that cannot be used.
constexpr const char * LLAMA_HOBBIT_FAULT =
    "the model is damaged, of a kind that cannot be run, or unfit for an override of its metadata";

//
// Model. Functions that can fail throw std::runtime_error.
//

// Opens the expert cache of the file, or returns null where llama.cpp loads the file as usual. Every key-value override
// whose key starts with "hobbit." is a setting of the cache. With a cache, params.load_mode becomes one without
// mapping.
llama_hobbit_ptr llama_hobbit_open(const std::string & fname, llama_model_params & params);

// The path of a model's first part; see hobbit_first_part.
std::string llama_hobbit_first_part(const std::string & fname);

// The model's cache, if any. Headers that llama.cpp's models include have no patch: they are compiled once for both.
llama_hobbit_ptr & llama_hobbit_of(const llama_model & lm);

// Lets the loader use the cache, which may be null: its description of each tensor in the file names the cache as
// `extra`. Removes the tensors of further tiers, because no architecture creates them. Throws where an override of
// metadata would be ignored or cut.
void llama_hobbit_attach(llama_model_loader & ml, hobbit_model * model);

// Tells the cache which device has which layer, and how many experts its tokens use.
void llama_hobbit_place_layers(const llama_model & lm);

// The buffer type that the attached cache chooses for a weight used by `op`, null where it chooses none. `described`
// is the loader's description of the weight.
ggml_backend_buffer_type_t llama_hobbit_buft(ggml_op op, const ggml_tensor & described, int block);

// Returns true if the tensor's data stays on disk.
bool llama_hobbit_is_remote(const ggml_tensor * tensor);

// Weights of our kernels lie in memory as in files: they may be mapped, and the buffer gets their type.
bool llama_hobbit_is_plain(ggml_backend_buffer_type_t buft);
void llama_hobbit_set_plain(ggml_backend_buffer_t mapped, ggml_backend_buffer_type_t buft);

// Lets go of mapped pages whose bytes were copied; they are read again if anybody asks.
void llama_hobbit_drop_pages(void * data, size_t size);

// Throws where the file has further tiers, which a quantized copy would take from another model.
void llama_hobbit_refuse_tiers(const llama_model_loader & ml);

//
// Context
//

// Makes the router's weights and its input sources of the layer's matrix products over experts in the cache, which
// ranks by the weights and predicts with the input: that of the matrix product from which `logits` follow. `weights` is
// older than the products over experts, and only the one with `down_exps` does not need the input. As sources they stay
// intact until these products are computed.
void llama_hobbit_attach_router(ggml_context * ctx, ggml_tensor * weights, const ggml_tensor * logits,
                                const ggml_tensor * down_exps);

// Constructs a context. Refuses a graph that the CPU would end the process for. Hands over the routers, and sizes the
// pools when all else is allocated. Throws std::runtime_error.
llama_context * llama_hobbit_new_context(const llama_model & lm, const llama_context_params & params);
void            llama_hobbit_free_context(llama_context * ctx);

// One batch, for the time in which it is computed; other contexts of the model wait.
class llama_hobbit_batch {
  public:
    // Records of use are kept by sequence. `can_repeat`: the caller asks repeats().
    llama_hobbit_batch(const llama_context & lctx, const llama_ubatch & ubatch, bool can_repeat);
    ~llama_hobbit_batch();

    llama_hobbit_batch(const llama_hobbit_batch &) = delete;

    // Was the batch that was just computed a draft whose logits, which may be null, ask for a second pass?
    bool repeats(ggml_backend_sched_t sched, const ggml_tensor * logits) const;

  private:
    hobbit_context * context_;
};

// Result of llama_decode() once its outputs are asked for: those from a machine that was lost meanwhile are wrong.
int32_t llama_hobbit_status(ggml_backend_sched_t sched);
