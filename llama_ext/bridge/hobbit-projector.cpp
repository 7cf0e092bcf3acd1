// SPDX-License-Identifier: MIT
#include "clip.h"
#include "ggml-backend.h"
#include "llama.h"

// Bytes of host memory that a projector (mmproj) will hold, with the buffers for an image of the usual size, by
// llama.cpp's own arithmetic: its weights are not read. 0 where the file is none, which the log explains. n_embd: gets
// the size of what it makes of a part of an image.
extern "C" LLAMA_API uint64_t hobbit_projector_bytes(const char * path, int32_t * n_embd) {
    // as mtmd_init_from_file() with its defaults
    clip_context_params params = {};
    params.use_gpu             = true;
    params.flash_attn_type     = CLIP_FLASH_ATTN_TYPE_AUTO;
    params.image_min_tokens    = -1;
    params.image_max_tokens    = -1;
    params.warmup              = true;
    params.no_alloc            = true;

    const clip_init_result found     = clip_init(path, params);
    clip_ctx * const       parts[]   = { found.ctx_v, found.ctx_a, found.ctx_gen_a };
    const clip_ctx * const projector = found.ctx_v != nullptr ? found.ctx_v : found.ctx_a;
    uint64_t               n_bytes   = 0;
    *n_embd                          = projector != nullptr ? clip_n_mmproj_embd(projector) : 0;
    for (clip_ctx * part : parts) {
        if (part != nullptr) {
            for (const auto & [device, size] : clip_get_mem_usage(part)) {
                n_bytes += ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU ? size : 0;
            }
        }
        clip_free(part);
    }
    return n_bytes;
}
