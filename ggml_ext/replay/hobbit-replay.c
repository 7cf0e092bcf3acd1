// SPDX-License-Identifier: MIT
#include "hobbit-replay.h"

#include "ggml.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

// The layer of a tensor that llama.cpp has named PREFIX-LAYER; -1 for all others, views of such a tensor included.
static int64_t layer_of(const struct ggml_tensor * tensor, const char * prefix) {
    const size_t length = strlen(prefix);
    int          layer  = -1;
    int          end    = 0;
    if (strncmp(tensor->name, prefix, length) != 0 || sscanf(tensor->name + length, "%d%n", &layer, &end) != 1) {
        return -1;
    }
    return tensor->name[length + end] == '\0' ? layer : -1;
}

static const char * check(const struct hobbit_replay * replay, const struct ggml_tensor * chosen, int64_t layer) {
    const struct ggml_tensor * probabilities = replay->probabilities;
    if (!probabilities || probabilities->ne[1] != chosen->ne[1]) {
        return "the probabilities of a router were not seen before its choice";
    }
    if (!replay->is_host(chosen->buffer) || !replay->is_host(probabilities->buffer)) {
        return "a router's choice is not in the memory of the CPU";
    }
    if (layer >= replay->n_layers || chosen->ne[0] != replay->n_used) {
        return "what is to be replayed has another shape than the model";
    }
    if (chosen->ne[1] != replay->n_positions && chosen->ne[1] != 1) {
        return "a layer computes other tokens than those announced";
    }
    return NULL;
}

// Rows need not be contiguous.
static char * row(const struct ggml_tensor * tensor, int64_t i) {
    return (char *) tensor->data + (size_t) i * tensor->nb[1];
}

static void overwrite(const struct hobbit_replay * replay, struct ggml_tensor * chosen, int64_t layer) {
    const struct ggml_tensor * probabilities = replay->probabilities;
    // llama.cpp also names a router's outputs so, where the softmax is over the chosen ones
    const bool    is_logits = probabilities->op == GGML_OP_MUL_MAT || probabilities->op == GGML_OP_ADD;
    const int64_t first     = replay->n_positions - chosen->ne[1]; // 0, or the last token
    for (int64_t i = 0; i < chosen->ne[1]; i++) {
        const int64_t place =
            (replay->positions[first + i] % replay->n_rows * replay->n_layers + layer) * replay->n_used;
        for (int64_t k = 0; k < replay->n_used; k++) {
            const int32_t expert                                       = replay->experts[place + k];
            const float   weight                                       = replay->weights[place + k];
            *(int32_t *) (row(chosen, i) + (size_t) k * chosen->nb[0]) = expert;
            *(float *) (row(probabilities, i) + (size_t) expert * probabilities->nb[0]) =
                is_logits ? logf(weight) : weight;
        }
    }
}

bool hobbit_replay_eval(struct ggml_tensor * tensor, bool ask, void * user_data) {
    struct hobbit_replay * replay = user_data;
    if (!replay->experts || strncmp(tensor->name, "ffn_moe_", 8) != 0) {
        return !ask;
    }
    if (layer_of(tensor, "ffn_moe_probs-") >= 0) {
        replay->probabilities = tensor;
        return !ask;
    }
    const int64_t layer = layer_of(tensor, "ffn_moe_topk-");
    if (layer < 0) {
        return !ask;
    }
    if (!ask) {
        const char * error = check(replay, tensor, layer);
        if (error) {
            replay->error = replay->error ? replay->error : error;
        } else {
            overwrite(replay, tensor, layer);
        }
        replay->probabilities = NULL;
    }
    return true;
}
