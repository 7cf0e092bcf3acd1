// SPDX-License-Identifier: MIT
//
// Overwrites the routers' choices while a model computes, through llama.cpp's public evaluation callback: the same for
// stock llama.cpp and for ours. The library links against nothing, so that it works with any build of the same ggml.
// trace.py compiles and loads it.

#include "ggml.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The caller owns everything that is pointed to. Thread-safety: none; one context.
struct hobbit_replay {
    // The routing to replay, [rows][n_layers][n_used], with a row for each token; NULL leaves the choice to the model.
    // Weights are positive.
    const int32_t * experts;
    const float *   weights;
    int64_t         n_layers;
    int64_t         n_used;

    // The rows of the tokens that are being computed. Only the logits of the last token are wanted, so a layer
    // computes either all tokens or the last one.
    int64_t first_row;
    int64_t n_tokens;

    // Functions of the build in use: ggml_backend_buffer_is_host, ggml_backend_tensor_get and ggml_backend_tensor_set.
    bool (*is_host)(struct ggml_backend_buffer * buffer);
    void (*get)(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
    void (*set)(struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);

    struct ggml_tensor * probabilities; // the current layer's; begin with NULL
    const char *         error;         // the first one, a sentence; begin with NULL
};

// The layer of a tensor that llama.cpp has named PREFIX-LAYER; -1 for all others, views of such a tensor included.
static int64_t layer_of(const struct ggml_tensor * tensor, const char * prefix) {
    const size_t length = strlen(prefix);
    int          layer  = -1;
    int          end    = 0;
    const bool   found  = strncmp(tensor->name, prefix, length) == 0 &&
                       sscanf(tensor->name + length, "%d%n", &layer, &end) == 1 && tensor->name[length + end] == '\0';
    return found ? layer : -1;
}

static const char * check(const struct hobbit_replay * replay, const struct ggml_tensor * chosen, int64_t layer) {
    const struct ggml_tensor * probabilities = replay->probabilities;
    if (!probabilities || probabilities->ne[1] != chosen->ne[1]) {
        return "the probabilities of a router were not seen before its choice";
    }
    if (replay->is_host(chosen->buffer) != replay->is_host(probabilities->buffer)) {
        return "a router's choice and its probabilities are in the memory of two devices";
    }
    if (layer >= replay->n_layers || chosen->ne[0] != replay->n_used) {
        return "what is to be replayed has another shape than the model";
    }
    if (chosen->ne[1] != replay->n_tokens && chosen->ne[1] != 1) {
        return "a layer computes other tokens than those announced";
    }
    return NULL;
}

// Bytes from the first to the last value, of 4 bytes each. Rows need not be contiguous.
static size_t span_of(const struct ggml_tensor * tensor) {
    return 4 + (size_t) (tensor->ne[0] - 1) * tensor->nb[0] + (size_t) (tensor->ne[1] - 1) * tensor->nb[1];
}

static char * at(char * values, const struct ggml_tensor * tensor, int64_t row, int64_t column) {
    return values + (size_t) row * tensor->nb[1] + (size_t) column * tensor->nb[0];
}

// Returns why the choice cannot be replayed, NULL where it was.
static const char * change(const struct hobbit_replay * replay, int64_t layer, struct ggml_tensor * chosen) {
    const char * error = check(replay, chosen, layer);
    if (error) {
        return error;
    }
    struct ggml_tensor * probabilities = replay->probabilities;
    // llama.cpp also names a router's outputs so, where the softmax is over the chosen ones
    const bool   is_logits = probabilities->op == GGML_OP_MUL_MAT || probabilities->op == GGML_OP_ADD;
    const size_t sizes[]   = { span_of(chosen), span_of(probabilities) };
    char *       numbers   = malloc(sizes[0] + sizes[1]);
    if (!numbers) {
        return "there is no memory for a copy of a router's choice";
    }
    char * values = numbers + sizes[0];
    replay->get(chosen, numbers, 0, sizes[0]);
    replay->get(probabilities, values, 0, sizes[1]);
    const int64_t first = replay->first_row + replay->n_tokens - chosen->ne[1]; // the first token's row or the last's
    for (int64_t i = 0; i < chosen->ne[1] * replay->n_used; i++) {
        const int64_t token = i / replay->n_used, k = i % replay->n_used;
        const int64_t place  = ((first + token) * replay->n_layers + layer) * replay->n_used + k;
        const int32_t expert = replay->experts[place];
        const float   weight = replay->weights[place];
        if (expert < 0 || expert >= probabilities->ne[0]) {
            error = "what is to be replayed chooses experts that the model does not have";
            break;
        }
        *(int32_t *) at(numbers, chosen, token, k)          = expert;
        *(float *) at(values, probabilities, token, expert) = is_logits ? logf(weight) : weight;
    }
    replay->set(chosen, numbers, 0, sizes[0]);
    replay->set(probabilities, values, 0, sizes[1]);
    free(numbers);
    return error;
}

// A ggml_backend_sched_eval_callback; user_data is a struct hobbit_replay. Asks to stop once per layer, where the
// experts have been chosen and their weights have not been read yet. Both may lie in a device's memory.
__attribute__((visibility("default"))) bool hobbit_replay_eval(struct ggml_tensor * tensor, bool ask,
                                                               void * user_data) {
    struct hobbit_replay * replay = user_data;
    const int64_t          layer  = replay->experts ? layer_of(tensor, "ffn_moe_topk-") : -1;
    if (layer >= 0 && !ask) {
        const char * error    = change(replay, layer, tensor);
        replay->error         = replay->error ? replay->error : error;
        replay->probabilities = NULL;
    } else if (layer < 0 && layer_of(tensor, "ffn_moe_probs-") >= 0) {
        replay->probabilities = tensor;
    }
    return layer >= 0 || !ask;
}
