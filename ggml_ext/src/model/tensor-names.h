// SPDX-License-Identifier: MIT
#pragma once

#include "model/expert.h"

#include <cstdint>
#include <string>

namespace hobbit {

// The name of a routed expert tensor: blk.N.PART.weight, or blk.N.PART.TIER.GROUP.weight for one of a further tier.
struct tensor_name {
    uint32_t    block = 0;
    part_id     part  = {};
    std::string tier; // empty under llama.cpp's own names
    uint32_t    group = 0;
};

// The part's name in llama.cpp's tensor names: "ffn_gate_exps".
const char * part_name(part_id part);

// False for every other name; `out` is then undefined.
bool parse_tensor_name(const std::string & name, tensor_name & out);

bool is_base_tensor(const std::string & name); // llama.cpp's own name
bool is_tier_tensor(const std::string & name); // the name of one of a further tier

} // namespace hobbit
