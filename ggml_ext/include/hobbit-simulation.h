// SPDX-License-Identifier: MIT
//
// Eviction policies, and recorded runs through the engine's own policies and rules without a model. Conventions as in
// hobbit.h.

#ifndef HOBBIT_SIMULATION_H
#define HOBBIT_SIMULATION_H

#include "hobbit.h"

#ifdef __cplusplus
extern "C" {
#endif

// One selection of a recorded run, in the order of the run: batches, in them layers, in them tokens, in them ranks. A
// batch ends where the layer goes back, or where a sequence has a further token and one of the two is counted
// (decoding). Every token has as many routes in each of its layers as struct hobbit_simulation says.
struct hobbit_route {
    int32_t sequence; // a number not seen before begins a sequence
    int32_t token;    // counts up within the sequence
    int32_t layer;
    int32_t expert;
    float   weight;  // weight of the router
    int32_t counted; // 0: warms the cache and is left out of the results (prefill)
};

struct hobbit_simulation {
    // Settings as hobbit_open takes them. Rule, numbers, policy, predictor and low_share decide; others have no effect.
    // A predictor that is given is judged one layer ahead. It must need routes alone, and loads nothing.
    const struct hobbit_setting * settings;
    size_t                        n_settings;

    uint32_t      belady; // 1: Belady's algorithm, the bound for one pool of equal experts, in place of hobbit.policy
    uint32_t      n_layers;
    uint32_t      n_experts;
    uint32_t      n_used; // per token, in the layer with the most
    uint32_t      slots_high;
    uint32_t      slots_low;
    uint32_t      floors;    // 1: a layer keeps its even share of a pool, as in the engine
    const float * low_costs; // costs for rules that take a price, see hobbit_set_costs; NULL: no costs
    const float * skip_costs;
    uint64_t      n_costs;
    double        bits_high; // per weight
    double        bits_low;

    const uint64_t * expert_bytes;    // [n_layers], which slots are sized by; NULL: all are alike
    const uint32_t * n_used_by_layer; // [n_layers], each 1 to n_used; NULL: n_used in all layers

    // Uses per token in earlier runs, [n_layers][n_experts], with which the pools are filled and the policy begins.
    // NULL: the pools are empty at first.
    const float * prior;

    const int32_t * paths; // hobbit.paths of a calibration, with which a predictor begins; NULL: none
    uint64_t        n_paths;
};

// Counts selections of counted tokens.
struct hobbit_simulation_result {
    uint64_t hits_high;
    uint64_t misses_high;
    uint64_t hits_low;
    uint64_t misses_low;
    uint64_t skipped;
    uint64_t n_tokens;
    double   penalty; // bits loaded, in units of an expert in high precision: 1 for a miss in high precision and
                      // bits_low / bits_high for one in low

    // Counts of the predictor, in layers after the first with a counted token; each expert counts once per layer and
    // batch. Recall is predicted_right / predictable, precision on misses predicted_missing_right / predicted_missing.
    uint64_t predictable;             // experts that were chosen
    uint64_t predicted_right;         // predicted ones of these
    uint64_t predicted_missing;       // experts that were predicted while they were resident in neither precision
    uint64_t predicted_missing_right; // chosen ones of these
};

// Slots of the high and the low pool in `capacity`, a share of the bytes of all experts in high precision, as
// hobbit_open_context divides its memory. Too small a capacity gives the smallest pools. Fails as hobbit_simulate does.
HOBBIT_API bool hobbit_simulated_pools(const struct hobbit_simulation * options, double capacity, uint32_t * high,
                                       uint32_t * low, char * err, size_t err_size);

// Replays routes, batch by batch, through the parts of the engine: its rule and its policy decide and count, with a
// pool per tier and demand loading. As in the engine, the running layer's experts keep their slots, and a miss that
// finds no slot is served without becoming resident. The policy knows each sequence by a number, which another one gets
// after its end, like a server's slots.
//
// The same options and routes give the same result. Fails for settings that hobbit_open refuses and for invalid sizes
// or routes; the result is then all zeros.
HOBBIT_API bool hobbit_simulate(const struct hobbit_route * routes, size_t n_routes,
                                const struct hobbit_simulation * options, struct hobbit_simulation_result * result,
                                char * err, size_t err_size);

#ifdef __cplusplus
}
#endif

#endif // HOBBIT_SIMULATION_H
