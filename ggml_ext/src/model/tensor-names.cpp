// SPDX-License-Identifier: MIT
#include "model/tensor-names.h"

#include "base/status.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace hobbit {

static const char * const PART_NAMES[PART_COUNT] = { "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps",
                                                     "ffn_down_exps" };

const char * part_name(uint32_t part) {
    return PART_NAMES[part];
}

bool parse_tensor_name(const std::string & name, tensor_name & out) {
    char part[64] = "";
    char rest[64] = "";
    if (name.size() >= 64 || sscanf(name.c_str(), "blk.%u.%63[^.].%63s", &out.block, part, rest) != 3) {
        return false;
    }
    out.part = std::find_if(PART_NAMES, PART_NAMES + PART_COUNT, [&](const char * p) { return strcmp(p, part) == 0; }) -
               PART_NAMES;
    if (out.part == PART_COUNT) {
        return false;
    }
    char tier[64] = "";
    out.tier.clear();
    if (sscanf(rest, "%63[^.].%u.weight", tier, &out.group) == 2) {
        out.tier = tier;
    }
    // sscanf also takes blanks, signs and leading zeros
    const std::string stem = format("blk.%u.%s.", out.block, part);
    return name == stem + (out.tier.empty() ? "weight" : format("%s.%u.weight", tier, out.group));
}

bool is_base_tensor(const std::string & name) {
    tensor_name parsed;
    return parse_tensor_name(name, parsed) && parsed.tier.empty();
}

bool is_tier_tensor(const std::string & name) {
    tensor_name parsed;
    return parse_tensor_name(name, parsed) && !parsed.tier.empty();
}

} // namespace hobbit
