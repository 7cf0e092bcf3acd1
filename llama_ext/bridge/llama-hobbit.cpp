// SPDX-License-Identifier: MIT
#include "llama-hobbit.h"

#include "ggml-backend-impl.h"
#include "hobbit.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-expert-cache.h"
#include "llama-model-loader.h"
#include "llama-model.h"
#include "llama-plan.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

static thread_local int llama_hobbit_n_guards = 0; // guards of this thread

// `failed`: "FILE:LINE: what failed". ggml ends the process when this returns.
static void llama_hobbit_on_abort(const char * failed) {
    if (llama_hobbit_n_guards == 0) {
        std::fprintf(stderr, "%s\n", failed);
        return;
    }
    const char * folder = std::strrchr(failed, '/');
    const char * whose  = std::strstr(failed, "ggml_ext/") ? "internal error of the expert cache" : LLAMA_HOBBIT_FAULT;
    throw std::runtime_error(std::string(whose) + "; this check failed: " + (folder ? folder + 1 : failed));
}

llama_hobbit_guard::llama_hobbit_guard() {
    [[maybe_unused]] static const auto previous = ggml_set_abort_callback(llama_hobbit_on_abort);
    llama_hobbit_n_guards++;
}

llama_hobbit_guard::~llama_hobbit_guard() {
    llama_hobbit_n_guards--;
}

void llama_hobbit_deleter::operator()(hobbit_model * model) const {
    hobbit_unref(model);
}

static void llama_hobbit_check_type(const llama_model_kv_override & kv, int type) {
    static const char * const names[] = { "int", "float", "bool", "str" };
    if (int(kv.tag) != type) {
        throw std::runtime_error(
            format("the override of %s is of type %s and must be %s", kv.key, names[kv.tag], names[type]));
    }
}

// The setting of an override. Throws where it has another type; a whole number is a number, too.
static hobbit_setting llama_hobbit_setting(const llama_model_kv_override & kv) {
    static constexpr char types[] = "fiibsss"; // by hobbit_setting_type, as "ifbs" by llama.cpp
    for (size_t i = 0; const hobbit_setting_spec * spec = hobbit_setting_spec_at(i); i++) {
        const bool is_whole = spec->type == HOBBIT_TYPE_NUMBER && kv.tag == LLAMA_KV_OVERRIDE_TYPE_INT;
        if (std::strcmp(spec->key, kv.key) == 0 && !is_whole) {
            llama_hobbit_check_type(kv, int(std::string("ifbs").find(types[spec->type])));
        }
    }
    switch (kv.tag) {
        case LLAMA_KV_OVERRIDE_TYPE_STR:   return { kv.key, 0.0, kv.val_str };
        case LLAMA_KV_OVERRIDE_TYPE_FLOAT: return { kv.key, kv.val_f64, nullptr };
        case LLAMA_KV_OVERRIDE_TYPE_BOOL:  return { kv.key, double(kv.val_bool), nullptr };
        default:                           return { kv.key, double(kv.val_i64), nullptr };
    }
}

llama_hobbit_ptr llama_hobbit_open(const std::string & fname, llama_model_params & params) {
    if (fname.empty()) {
        return nullptr;
    }
    std::vector<hobbit_setting> settings = { { "hobbit.pack", double(params.use_extra_bufts), nullptr } };
    for (const auto * kv = params.kv_overrides; kv && kv->key[0] != 0; ++kv) {
        if (std::strncmp(kv->key, "hobbit.", 7) == 0) {
            settings.push_back(llama_hobbit_setting(*kv));
        }
    }

    char           err[1024];
    hobbit_model * model = nullptr;
    if (!hobbit_open(fname.c_str(), settings.data(), settings.size(), &model, err, sizeof(err))) {
        throw std::runtime_error(err);
    }
    if (model) {
        // the rest of the model is read into memory of its own: a mapping would be dropped under pressure
        const bool lock  = params.load_mode == LLAMA_LOAD_MODE_MLOCK || params.load_mode == LLAMA_LOAD_MODE_MMAP_MLOCK;
        params.load_mode = lock ? LLAMA_LOAD_MODE_MLOCK : LLAMA_LOAD_MODE_NONE;
    }
    return llama_hobbit_ptr(model);
}

std::string llama_hobbit_first_part(const std::string & fname) {
    std::string first(PATH_MAX, 0);
    first.resize(std::min(first.size(), hobbit_first_part(fname.c_str(), first.data(), first.size())));
    return first;
}

// Throws where llama.cpp would ignore an override of a key that the file has, or cut its value.
static void llama_hobbit_check_override(const gguf_context * metadata, const llama_model_kv_override & kv) {
    const int64_t id = gguf_find_key(metadata, kv.key);
    if (id < 0) {
        return;
    }
    const auto fail = [&](const std::string & why) {
        throw std::runtime_error(format("the override of %s ", kv.key) + why);
    };
    switch (gguf_get_kv_type(metadata, id)) {
        case GGUF_TYPE_ARRAY:   fail("is one value, and this model has one for each layer"); break;
        case GGUF_TYPE_BOOL:    llama_hobbit_check_type(kv, LLAMA_KV_OVERRIDE_TYPE_BOOL); break;
        case GGUF_TYPE_STRING:  llama_hobbit_check_type(kv, LLAMA_KV_OVERRIDE_TYPE_STR); break;
        case GGUF_TYPE_FLOAT32:
        case GGUF_TYPE_FLOAT64: llama_hobbit_check_type(kv, LLAMA_KV_OVERRIDE_TYPE_FLOAT); break;
        default:
            llama_hobbit_check_type(kv, LLAMA_KV_OVERRIDE_TYPE_INT);
            if (kv.val_i64 != int64_t(uint32_t(kv.val_i64))) { // llama.cpp reads so many bits
                fail(format("cannot be %lld", (long long) kv.val_i64));
            }
    }
}

void llama_hobbit_attach(llama_model_loader & ml, hobbit_model * model) {
    if (!model) {
        return;
    }
    for (const auto & each : ml.kv_overrides) {
        llama_hobbit_check_override(ml.metadata, each.second);
    }
    uint32_t n_blocks = 0, n_drafts = 0;
    if (!ml.load_mtp && ml.get_key(LLM_KV_BLOCK_COUNT, n_blocks, false) &&
        ml.get_key(LLM_KV_NEXTN_PREDICT_LAYERS, n_drafts, false)) {
        hobbit_set_run_blocks(model, n_blocks - std::min(n_blocks, n_drafts));
    }
    for (auto it = ml.weights_map.begin(); it != ml.weights_map.end();) {
        ggml_tensor *       tensor = it->second.tensor;
        const std::string & name   = it->first;
        if (!hobbit_is_tier_tensor(name.c_str())) {
            tensor->extra = model;
            ++it;
            continue;
        }
        const std::string own = name.substr(0, name.find('.', name.find("ffn_"))) + ".weight";
        ml.n_tensors--;
        if (gguf_find_tensor(ml.metadata, own.c_str()) >= 0) {
            ml.n_elements -= ggml_nelements(tensor);
            ml.n_bytes    -= ggml_nbytes(tensor);
        } else { // the groups that a file has instead are one tensor; the cache knows their types
            const auto [whole, is_first]  = ml.weights_map.emplace(own, it->second);
            whole->second.tensor->ne[2]  += is_first ? 0 : tensor->ne[2];
            ml.n_tensors                 += is_first;
            ggml_set_name(whole->second.tensor, own.c_str());
        }
        it = ml.weights_map.erase(it);
    }
}

void llama_hobbit_place_layers(const llama_model & lm) {
    hobbit_model * model = llama_model_expert_cache(&lm);
    if (!model) {
        return;
    }
    std::vector<ggml_backend_dev_t> devs(lm.hparams.n_layer_all);
    std::vector<uint32_t>           n_used(devs.size());
    for (size_t il = 0; il < devs.size(); ++il) {
        devs[il]   = lm.dev_layer(il);
        n_used[il] = lm.hparams.n_expert_used(il);
    }
    hobbit_set_experts_used(model, n_used.data(), n_used.size());
    if (lm.hparams.n_layer_nextn == 0) { // the file lacks the draft block that its metadata name
        hobbit_set_run_blocks(model, UINT32_MAX);
    }
    char       err[1024];
    const bool can_repeat = !llama_model_is_recurrent(&lm) && !llama_model_is_hybrid(&lm);
    if (!hobbit_place_layers(model, devs.data(), devs.size(), can_repeat, err, sizeof(err))) {
        throw std::runtime_error(err);
    }
}

ggml_backend_buffer_type_t llama_hobbit_buft(ggml_op op, const ggml_tensor & described, int block) {
    auto * model = static_cast<hobbit_model *>(described.extra);
    if (!model) {
        return nullptr;
    }
    if ((op == GGML_OP_MUL_MAT_ID || op == GGML_OP_GET_ROWS) && hobbit_owns_tensor(model, described.name)) {
        return hobbit_buffer_type(model, block);
    }
    // biases of experts: where they lie decides where they are added, and the addition is part of the layer
    return op == GGML_OP_ADD_ID ? hobbit_device_buffer_type(model, block) : nullptr;
}

bool llama_hobbit_is_remote(const ggml_tensor * tensor) {
    return tensor->buffer && std::strncmp(ggml_backend_buffer_name(tensor->buffer), "DISK_HOBBIT", 11) == 0;
}

bool llama_hobbit_is_plain(ggml_backend_buffer_type_t buft) {
    return std::strcmp(ggml_backend_buft_name(buft), "CPU_PLAIN_ROWS") == 0;
}

void llama_hobbit_set_plain(ggml_backend_buffer_t mapped, ggml_backend_buffer_type_t buft) {
    if (llama_hobbit_is_plain(buft)) {
        mapped->buft = buft;
    }
}

void llama_hobbit_drop_pages(void * data, size_t size) {
    const auto      page  = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = GGML_PAD(uintptr_t(data), page);
    const uintptr_t end   = (uintptr_t(data) + size) / page * page;
    madvise((void *) begin, end > begin ? end - begin : 0, MADV_DONTNEED);
}

void llama_hobbit_refuse_tiers(const llama_model_loader & ml) {
    for (const auto & [name, weight] : ml.weights_map) {
        if (hobbit_is_tier_tensor(name.c_str())) {
            throw std::runtime_error(
                "the file has its experts in several precisions: quantize the model that it was made from");
        }
    }
}

void llama_hobbit_attach_router(ggml_context * ctx, ggml_tensor * weights, const ggml_tensor * logits,
                                const ggml_tensor * down_exps) {
    const ggml_tensor * product = logits;
    while (product && product->op != GGML_OP_MUL_MAT) {
        product = product->src[0];
    }
    // a router that ran before the layer dropped tokens has more rows
    ggml_tensor * input = product && ggml_nrows(product) == ggml_nrows(logits) ? product->src[1] : nullptr;
    for (ggml_tensor * t = weights; t; t = ggml_get_next_tensor(ctx, t)) {
        if (t->op == GGML_OP_MUL_MAT_ID && llama_hobbit_is_remote(t->src[0])) {
            t->src[3] = weights;
            t->src[4] = t->src[0] == down_exps ? nullptr : input;
        }
    }
}

// Every llama_context is one. The handle comes first, so that it is closed last.
struct llama_hobbit_handle {
    hobbit_context * hobbit = nullptr; // thresholds of the expert cache, if any

    ~llama_hobbit_handle() { hobbit_close_context(hobbit); }
};

struct llama_hobbit_own_context : llama_hobbit_handle, llama_context {
    using llama_context::llama_context;
};

llama_hobbit_batch::llama_hobbit_batch(const llama_context & lctx, const llama_ubatch & ubatch, bool can_repeat) :
    context_(llama_expert_cache_context(&lctx)) {
    if (!context_) {
        return;
    }
    std::vector<int32_t> seqs(ubatch.n_tokens);
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        seqs[i] = ubatch.seq_id[i][0];
    }
    hobbit_begin_batch(context_, ubatch.n_tokens, seqs.data(), ubatch.pos, ubatch.output, can_repeat);
}

llama_hobbit_batch::~llama_hobbit_batch() {
    if (context_) {
        hobbit_end_batch(context_);
    }
}

bool llama_hobbit_batch::repeats(ggml_backend_sched_t sched, const ggml_tensor * logits) const {
    if (!context_ || !hobbit_is_draft(context_)) {
        return false;
    }
    ggml_backend_sched_synchronize(sched); // the second pass writes what the first one may still be reading
    if (!logits) {
        return hobbit_repeats_batch(context_, nullptr, 0, 0);
    }
    std::vector<float> values(ggml_nelements(logits));
    ggml_backend_tensor_get(logits, values.data(), 0, ggml_nbytes(logits));
    return hobbit_repeats_batch(context_, values.data(), ggml_nrows(logits), logits->ne[0]);
}

const char * llama_lost_machine(void) {
    ggml_backend_reg_t reg  = ggml_backend_reg_by_name("RPC");
    static void *      lost = reg ? ggml_backend_reg_get_proc_address(reg, "ggml_backend_rpc_failure") : nullptr;
    return lost ? static_cast<std::atomic<const char *> *>(lost)->load() : nullptr;
}

int32_t llama_hobbit_status(ggml_backend_sched_t sched) {
    bool is_remote = false;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        const char * name = ggml_backend_name(ggml_backend_sched_get_backend(sched, i));
        is_remote         = is_remote || std::strncmp(name, "RPC", 3) == 0;
    }
    if (is_remote) {
        ggml_backend_sched_synchronize(sched);
    }
    return is_remote && llama_lost_machine() ? -3 : 0;
}

hobbit_model * llama_model_expert_cache(const llama_model * model) {
    return llama_hobbit_of(*model).get();
}

hobbit_context * llama_expert_cache_context(const llama_context * ctx) {
    return static_cast<const llama_hobbit_own_context *>(ctx)->hobbit;
}

static hobbit_gating llama_hobbit_gating(const llama_hparams & hparams) {
    switch (hparams.expert_gating_func) {
        case LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID:       return HOBBIT_GATING_SIGMOID;
        case LLAMA_EXPERT_GATING_FUNC_TYPE_SQRT_SOFTPLUS: return HOBBIT_GATING_SQRT_SOFTPLUS;
        default:                                          return HOBBIT_GATING_SOFTMAX;
    }
}

// Reads from the graph what no hyper-parameter tells: the vector by which the router's input was multiplied last, and
// the gating. A node on another device has copies as its sources: where they hide the router, `router` stays as it is.
static void llama_hobbit_read_graph(ggml_cgraph * graph, hobbit_router & router) {
    const ggml_tensor * last = nullptr; // that follows from the router's product
    for (int i = 0; graph && i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (!last && node->op == GGML_OP_MUL_MAT && node->src[0] == router.weight) {
            const ggml_tensor * input = node->src[1];
            while (input->op == GGML_OP_RESHAPE) {
                input = input->src[0];
            }
            const ggml_tensor * gain = input->op == GGML_OP_MUL ? input->src[1] : nullptr;
            if (gain && gain->buffer &&
                ggml_backend_buffer_get_usage(gain->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
                router.gain = gain;
            }
            last = node;
            continue;
        }
        if (!last || node->src[0] != last) {
            continue;
        }
        switch (node->op) {
            case GGML_OP_SOFT_MAX: router.gating = HOBBIT_GATING_SOFTMAX; return;
            case GGML_OP_UNARY:
                router.gating = ggml_get_unary_op(node) == GGML_UNARY_OP_SIGMOID ? HOBBIT_GATING_SIGMOID
                                                                                 : HOBBIT_GATING_SQRT_SOFTPLUS;
                return;
            case GGML_OP_ARGSORT: break; // chooses by the outputs themselves
            default:              last = node;
        }
    }
}

// Returns false for operations that a damaged header can cause and for which the CPU backend ends the process: a
// rotation of more values than a row has, or of an odd number, and a norm or a bias that is not F32.
static bool llama_hobbit_can_compute(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_ADD:
        case GGML_OP_SUB:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
        case GGML_OP_ADD_ID: return node->src[0]->type != GGML_TYPE_F32 || node->src[1]->type == GGML_TYPE_F32;
        case GGML_OP_ROPE:   {
            const int64_t n_rotated = node->op_params[1];
            const int64_t first     = node->op_params[15];
            return n_rotated >= 0 && n_rotated % 2 == 0 && first + n_rotated <= node->ne[0];
        }
        default: return true;
    }
}

// GPUs compute other types, too: where there is one, the graph is not looked at.
static void llama_hobbit_check_graph(const llama_context & lctx) {
    const llm_graph_result * reserved = lctx.get_gf_res_reserve();
    ggml_cgraph *            graph    = reserved && lctx.get_model().devices.empty() ? reserved->get_gf() : nullptr;
    for (int i = 0; graph && i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (!llama_hobbit_can_compute(node)) {
            throw std::runtime_error(
                format("%s: the CPU cannot compute %s '%s' of it", LLAMA_HOBBIT_FAULT, ggml_op_desc(node), node->name));
        }
    }
}

static hobbit_context * llama_hobbit_open_context(const llama_context & lctx) {
    const llama_model & lm    = lctx.get_model();
    hobbit_model *      model = llama_model_expert_cache(&lm);
    if (!model || lm.hparams.no_alloc || lm.hparams.vocab_only) {
        return nullptr;
    }
    char                     err[1024];
    const llm_graph_result * reserved = lctx.get_gf_res_reserve();
    ggml_cgraph *            graph    = reserved ? reserved->get_gf() : nullptr;
    for (size_t il = 0; il < lm.layers.size(); ++il) {
        const llama_layer & layer  = lm.layers[il];
        hobbit_router       router = { layer.ffn_gate_inp,    layer.ffn_gate_inp_b,
                                       layer.ffn_exp_probs_b, llama_hobbit_gating(lm.hparams),
                                       /* .gain = */ nullptr, lm.hparams.n_expert_used(il) };
        llama_hobbit_read_graph(graph, router);
        if (router.weight && !hobbit_set_router(model, il, &router, err, sizeof(err))) {
            throw std::runtime_error(err);
        }
    }
    const llama_hobbit_plan needs   = llama_hobbit_needs(lctx, model);
    hobbit_context *        context = nullptr;
    hobbit_set_snapshot_size(model, needs.snapshot);
    if (!hobbit_open_context(model, needs.weights + needs.context + needs.compute, lctx.get_cparams().n_ubatch,
                             &context, err, sizeof(err))) {
        throw std::runtime_error(err);
    }
    return context;
}

llama_context * llama_hobbit_new_context(const llama_model & lm, const llama_context_params & params) {
    std::unique_ptr<llama_hobbit_own_context> ctx;
    {
        const llama_hobbit_guard guard;
        ctx.reset(new llama_hobbit_own_context(lm, params));
    }
    llama_hobbit_check_graph(*ctx);
    ctx->hobbit = llama_hobbit_open_context(*ctx);
    if (ctx->hobbit) {
        hobbit_share_queues(ctx->get_sched());
    }
    return ctx.release();
}

void llama_hobbit_free_context(llama_context * ctx) {
    delete static_cast<llama_hobbit_own_context *>(ctx);
}
