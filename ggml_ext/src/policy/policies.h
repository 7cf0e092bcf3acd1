// SPDX-License-Identifier: MIT
#pragma once

#include "policy/cache-policy.h"

#include <memory>

// The policies behind make_policy, and what each says an expert of layer l is worth while layer i of n runs. What a
// policy remembers is of all experts, resident or not.

namespace hobbit {

// 1 for the layer that runs, less by 1/n for each layer that comes before it is that layer's turn.
double layer_nearness(layer_id layer, layer_id running, uint32_t n_layers);

//
// Baselines; their counts run over all sequences and are never reset
//

// Least recently used: the number of uses of any expert up to this expert's last one.
std::unique_ptr<cache_policy> make_lru(const policy_options & options);

// Least frequently used: the number of tokens that used it.
std::unique_ptr<cache_policy> make_lfu(const policy_options & options);

// Least frequently used in high precision (section 3.4 of HOBBIT, arXiv 2411.01433): the number of tokens that it
// served in high precision.
std::unique_ptr<cache_policy> make_lhu(const policy_options & options);

// Farthest layer distance (section 3.4 of HOBBIT): 1 - ((l - i + n) mod n) / n, which is layer_nearness.
std::unique_ptr<cache_policy> make_fld(const policy_options & options);

// A number drawn anew each time; the same numbers for the same seed.
std::unique_ptr<cache_policy> make_random(const policy_options & options);

//
// Published policies
//

// Eq. 3 of HOBBIT (arXiv 2411.01433):
//   w_lru R/T + w_lfu F/T + w_lhu H/T + w_fld (1 - ((l - i + n) mod n) / n)
// R: index of the last token that used it; F: tokens that used it; H: those served in high precision; T: tokens so far;
// all of one sequence, shared by the pools of both tiers. Of several sequences the largest value counts.
std::unique_ptr<cache_policy> make_hobbit(const policy_options & options);

// MoE-Infinity (arXiv 2401.14361), expert cache, in our reading: (A[l, e] / sum of A[l] + epsilon) (1 - l / n), where A
// counts the tokens of the sequence that used the expert: the share of its layer's uses, and first layers first,
// because prefetch serves later layers better. Of several sequences the largest value counts. Here l counts from 0 and
// epsilon is 1e-4.
std::unique_ptr<cache_policy> make_moe_infinity(const policy_options & options);

// EdgeMoE (arXiv 2308.14352), section III-C2: f / d, where f is how often the expert was used and d how many layers
// ahead it lies, from 1 (the next layer) to n (the layer that runs, which comes again in the next token). The paper's
// formula has (n - l + i) mod n in the place of d, which is 0 for the layer that runs and grows the nearer a layer is,
// against what its text says; we follow the text. f counts over all sequences, where the paper takes it from a profile.
std::unique_ptr<cache_policy> make_edgemoe(const policy_options & options);

//
// Our own
//

// Echo: the discounted number of uses to be expected, from how often the expert is used and from what past tokens used
// that were like the present one. docs/policies.md has the formulas.
std::unique_ptr<cache_policy> make_echo(const policy_options & options);

} // namespace hobbit
