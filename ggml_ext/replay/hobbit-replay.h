// SPDX-License-Identifier: MIT
//
// Overwrites the routers' choices while a model computes, through llama.cpp's public evaluation callback: the same for
// stock llama.cpp and for ours, and for measurements only. Links against nothing, so that it goes with any build of
// the same ggml. The Python side is pyhobbit/bench/replay.py.

#ifndef HOBBIT_REPLAY_H
#define HOBBIT_REPLAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_tensor;
struct ggml_backend_buffer;

// The caller owns everything that is pointed to. Thread-safety: none; one context.
struct hobbit_replay {
    // The routing to replay, [n_rows][n_layers][n_used]; NULL leaves the choice to the model. Weights are positive.
    const int32_t * experts;
    const float *   weights;
    int64_t         n_rows;
    int64_t         n_layers;
    int64_t         n_used;

    // The rows of the tokens that are being computed. Only the logits of the last token are wanted, so a layer
    // computes either all tokens or the last one.
    int64_t first_row;
    int64_t n_tokens;

    // Of the build in use: ggml_backend_buffer_is_host, ggml_backend_tensor_get and ggml_backend_tensor_set.
    bool (*is_host)(struct ggml_backend_buffer * buffer);
    void (*get)(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
    void (*set)(struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);

    struct ggml_tensor * probabilities; // of the layer in hand; begin with NULL
    const char *         error;         // the first one, a sentence; begin with NULL
};

// A ggml_backend_sched_eval_callback; user_data is a struct hobbit_replay. Asks to stop once per layer, where the
// experts have been chosen and their weights have not been taken yet. Both may lie in a device's memory.
__attribute__((visibility("default"))) bool hobbit_replay_eval(struct ggml_tensor * tensor, bool ask, void * user_data);

#ifdef __cplusplus
}
#endif

#endif // HOBBIT_REPLAY_H
