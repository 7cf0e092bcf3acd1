// SPDX-License-Identifier: MIT
#include "llama-plan.h"

#include "llama-context.h"
#include "llama-cpp.h"
#include "llama-ext.h"
#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

// Repacked weights lie in a buffer type of the CPU that is not a host buffer type, and integrated GPUs use host memory,
// as the cache does for activations unless its pools are on a device.
static bool llama_hobbit_is_host_memory(ggml_backend_buffer_type_t buft, bool on_device) {
    ggml_backend_dev_t dev     = ggml_backend_buft_get_device(buft);
    const auto         type    = dev ? ggml_backend_dev_type(dev) : GGML_BACKEND_DEVICE_TYPE_GPU;
    const bool         is_file = std::strncmp(ggml_backend_buft_name(buft), "DISK_HOBBIT", 11) == 0;
    return ggml_backend_buft_is_host(buft) || type == GGML_BACKEND_DEVICE_TYPE_CPU ||
           type == GGML_BACKEND_DEVICE_TYPE_IGPU || (type == GGML_BACKEND_DEVICE_TYPE_ACCEL && !is_file && !on_device);
}

// How often memory_breakdown() counts such a compute buffer: with no_alloc, once for each backend that shares it.
static size_t llama_hobbit_times_counted(const llama_context & lctx, ggml_backend_buffer_type_t buft) {
    ggml_backend_sched_t sched = lctx.get_sched();
    size_t               times = 0;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        times += ggml_backend_sched_get_buffer_type(sched, ggml_backend_sched_get_backend(sched, i)) == buft;
    }
    return lctx.get_model().hparams.no_alloc && times > 0 ? times : 1;
}

// The CPU converts a batch's activations for each matrix product: two bytes for each at most.
static size_t llama_hobbit_work_bytes(const llama_context & lctx) {
    int64_t widest = 0;
    for (const auto & [name, tensor] : lctx.get_model().tensors_by_name) {
        widest = std::max(widest, tensor->ne[0]);
    }
    return size_t(widest) * lctx.get_cparams().n_ubatch * sizeof(ggml_fp16_t);
}

// llama.cpp's memory for the vocabulary: a token's text in two tables and as printed, and entries for merges.
static size_t llama_hobbit_vocabulary_bytes(const llama_vocab & vocab) {
    static constexpr size_t TOKEN = 144;
    static constexpr size_t MERGE = 120;
    return size_t(vocab.n_tokens()) * (TOKEN + (vocab.get_type() == LLAMA_VOCAB_TYPE_BPE ? MERGE : 0));
}

template <typename Memory>
static size_t llama_hobbit_bytes(const Memory & memory) {
    size_t sum = 0;
    for (const auto & [buft, size] : memory.memory_breakdown()) {
        sum += size;
    }
    return sum;
}

// Bytes of the cells that one sequence fills in layers with a window.
static size_t llama_hobbit_window_bytes(const llama_context & lctx, const llama_kv_cache & kv) {
    const uint32_t n_cells = lctx.get_model().hparams.n_swa + lctx.get_cparams().n_ubatch;
    return llama_hobbit_bytes(kv) / kv.get_size() / kv.get_n_stream() * std::min(kv.get_size(), n_cells);
}

// Bytes of one sequence's states and windows.
static size_t llama_hobbit_snapshot_bytes(const llama_context & lctx, const llama_memory_i * memory) {
    if (const auto * m = dynamic_cast<const llama_memory_recurrent *>(memory)) {
        return llama_hobbit_bytes(*m) / std::max(m->size, 1u);
    }
    if (const auto * m = dynamic_cast<const llama_memory_hybrid *>(memory)) {
        return llama_hobbit_snapshot_bytes(lctx, m->get_mem_recr());
    }
    if (const auto * m = dynamic_cast<const llama_memory_hybrid_iswa *>(memory)) {
        return llama_hobbit_snapshot_bytes(lctx, m->get_mem_recr()) +
               llama_hobbit_snapshot_bytes(lctx, m->get_mem_attn());
    }
    if (const auto * m = dynamic_cast<const llama_kv_cache_iswa *>(memory)) {
        return llama_hobbit_window_bytes(lctx, *m->get_swa());
    }
    if (const auto * m = dynamic_cast<const llama_kv_cache_dsa_iswa *>(memory)) {
        return llama_hobbit_window_bytes(lctx, *m->get_swa());
    }
    if (const auto * m = dynamic_cast<const llama_kv_cache_dsv4 *>(memory)) {
        size_t states = 0;
        for (const llama_dsv4_comp_state * each : { m->get_csa_state(), m->get_hca_state(), m->get_lid_state() }) {
            states += llama_hobbit_bytes(*each) / each->get_n_stream();
        }
        return llama_hobbit_snapshot_bytes(lctx, m->get_raw()) + states;
    }
    return 0;
}

llama_hobbit_plan llama_hobbit_needs(const llama_context & lctx, const hobbit_model * cache) {
    const llama_model & model  = lctx.get_model();
    llama_hobbit_plan   sum    = {};
    uint64_t            placed = 0; // bytes of weights
    hobbit_info         info   = {};
    if (cache) {
        hobbit_get_info(cache, &info);
    }
    for (const auto & [buft, size] : lctx.memory_breakdown()) {
        placed += size.model;
        if (llama_hobbit_is_host_memory(buft, info.on_device)) {
            sum.weights += size.model;
            sum.context += size.context;
            sum.compute += size.compute / llama_hobbit_times_counted(lctx, buft);
        } else {
            sum.device_compute += size.compute / llama_hobbit_times_counted(lctx, buft);
        }
    }
    if (!cache) { // files are mapped with what nobody uses, such as a draft head
        sum.weights += model.size() - std::min<uint64_t>(model.size(), placed);
    }
    sum.weights += llama_hobbit_vocabulary_bytes(model.vocab);
    sum.compute += llama_hobbit_work_bytes(lctx);

    const size_t states = llama_hobbit_snapshot_bytes(lctx, lctx.get_memory());
    sum.snapshot        = states + states / 64; // with positions and the like
    return sum;
}

// Bytes by token of a pass: llama.cpp allows graphs of 40 nodes for it, and keeps two.
static constexpr uint64_t HEAD_GRAPHS = 44 << 10;
// Copies of the states of a pass: llama.cpp's, the server's, and those in the head's batch.
static constexpr uint64_t HEAD_COPIES = 6;

// The needs of the draft head that runs beside the context. From then on both contexts keep the states that it reads.
static llama_hobbit_plan llama_hobbit_head_needs(llama_context * ctx, llama_context_params params,
                                                 const hobbit_model * cache) {
    llama_model * model = const_cast<llama_model *>(llama_get_model(ctx));
    params.ctx_type     = LLAMA_CONTEXT_TYPE_MTP;
    params.ctx_other    = ctx;
    params.n_rs_seq     = 0;
    const llama_context_ptr head(llama_init_from_model(model, params));
    if (!head) {
        char err[1024];
        throw std::runtime_error(hobbit_last_error(err, sizeof(err)) > 0
                                     ? err
                                     : "llama.cpp cannot run this model's draft head; serve it without");
    }
    llama_set_embeddings_nextn(ctx, true, /* masked = */ false);
    llama_set_embeddings_nextn(head.get(), true, /* masked = */ true);
    llama_hobbit_plan needs  = llama_hobbit_needs(*head, cache);
    const uint64_t    state  = sizeof(float) * uint64_t(llama_model_n_embd_out(model));
    needs.context           += params.n_batch * (HEAD_GRAPHS + HEAD_COPIES * state);
    return needs;
}

namespace {

constexpr uint64_t CELL = 64; // bytes of llama.cpp for a token of context beside the KV cache, with no_alloc too

// Opens contexts of a model of no_alloc, one after the other, and tells what each needs.
class planner {
  public:
    struct needs {
        llama_hobbit_plan plan  = {};
        bool              fits  = false;
        std::string       error = {};

        double of_context() const {
            return double(plan.context + plan.compute + plan.device_compute + plan.pools.batch_bytes);
        }
    };

    planner(llama_model * model, hobbit_model * cache, llama_context_params & params,
            const llama_hobbit_choice & choice) :
        model_(model), cache_(cache), params_(params), choice_(choice) {
        open();
    }

    needs choose() {
        const needs own   = last_;
        uint32_t    n_ctx = params_.n_ctx, n_batch = params_.n_ubatch;
        for (size_t i = choice_.n_contexts; i > 0 && n_ctx < choice_.contexts[i - 1]; i--) {
            n_ctx = is_good(own, of(choice_.contexts[i - 1], n_batch)) ? choice_.contexts[i - 1] : n_ctx;
        }
        const needs narrow = of(n_ctx, n_batch);
        bool        pays   = cache_ && narrow.fits && !narrow.plan.pools.holds_all;
        for (size_t i = 0; pays && i < choice_.n_batches; i++) {
            const uint32_t n = std::max(n_batch, std::min(choice_.batches[i], n_ctx));
            pays             = of(n_ctx, n).fits && spares(narrow, last_);
            n_batch          = pays ? n : n_batch;
        }
        needs chosen = of(n_ctx, n_batch);
        if (chosen.plan.pools.shortage == HOBBIT_SHORT_OF_MEMORY) {
            for (uint32_t less = n_ctx / 2; less >= 256 && !chosen.plan.n_ctx_less; less /= 2) {
                chosen.plan.n_ctx_less = of(less, std::min(n_batch, less)).fits ? less : 0;
            }
        }
        params_.n_ctx   = n_ctx;
        params_.n_batch = params_.n_ubatch = n_batch;
        return chosen;
    }

  private:
    // Returns the needs with another context. The cache's figures are of what was asked for last.
    const needs & of(uint32_t n_ctx, uint32_t n_batch) {
        if (n_ctx != params_.n_ctx || n_batch != params_.n_ubatch) {
            params_.n_ctx   = n_ctx;
            params_.n_batch = params_.n_ubatch = n_batch;
            open();
        }
        return last_;
    }

    bool spares(const needs & own, const needs & larger) const {
        return larger.of_context() <= own.of_context() + choice_.share * double(own.plan.pools.pool_bytes);
    }

    bool is_good(const needs & own, const needs & larger) const {
        if (!cache_) {
            const double free = double(choice_.available) - double(own.plan.weights);
            return larger.fits && larger.of_context() <= free / 2;
        }
        const bool all = own.plan.pools.holds_all && !choice_.has_pools;
        return own.fits && larger.fits && (all ? larger.plan.pools.holds_all : spares(own, larger));
    }

    void open() {
        last_ = {};
        if (params_.n_ctx * CELL > choice_.available) {
            last_.error = format("a context of %u tokens does not fit into memory; use a smaller --ctx", params_.n_ctx);
            return;
        }
        const llama_context_ptr ctx(llama_init_from_model(model_, params_));
        if (!ctx) {
            return;
        }
        llama_hobbit_plan & plan = last_.plan;
        try {
            const bool head      = choice_.has_head;
            const auto own       = head ? llama_hobbit_head_needs(ctx.get(), params_, cache_) : llama_hobbit_plan();
            plan                 = llama_hobbit_needs(*ctx, cache_);
            plan.head            = own.context + own.compute;
            plan.context        += own.context;
            plan.compute        += own.compute;
            plan.device_compute += own.device_compute;
            plan.n_rollback      = llama_n_rs_seq(ctx.get());
            last_.fits           = true;
        } catch (const std::exception & e) {
            last_.error = e.what();
        }
        if (char err[4096] = ""; last_.fits && cache_) {
            hobbit_set_snapshot_size(cache_, plan.snapshot);
            last_.fits  = hobbit_plan_pools(cache_, plan.weights + plan.context + plan.compute, params_.n_ubatch,
                                            &plan.pools, err, sizeof(err));
            last_.error = err;
        }
    }

    llama_model * const         model_;
    hobbit_model * const        cache_; // null where the model runs without one
    llama_context_params &      params_;
    const llama_hobbit_choice & choice_;
    needs                       last_; // the needs with params_
};

} // namespace

bool llama_hobbit_plan_make(llama_model * model, hobbit_model * cache, llama_context_params * params,
                            const llama_hobbit_choice * choice, llama_hobbit_plan * plan, char * err, size_t err_size) {
    const planner::needs chosen = planner(model, cache, *params, *choice).choose();
    *plan                       = chosen.plan;
    snprintf(err, err_size, "%s", chosen.error.c_str());
    return chosen.fits;
}
