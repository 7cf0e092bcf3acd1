// SPDX-License-Identifier: MIT
#include "model/tensor-names.h"

#include "base/status.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace hobbit {

static const per_part<const char *> PART_NAMES = { { "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps",
                                                     "ffn_down_exps" } };

const char * part_name(part_id part) {
    return PART_NAMES[part];
}

bool parse_tensor_name(const std::string & name, tensor_name & out) {
    char part[64] = "";
    char rest[64] = "";
    if (name.size() >= 64 || sscanf(name.c_str(), "blk.%u.%63[^.].%63s", &out.block, part, rest) != 3) {
        return false;
    }
    const auto found =
        std::find_if(PART_NAMES.begin(), PART_NAMES.end(), [&](const char * p) { return strcmp(p, part) == 0; });
    if (found == PART_NAMES.end()) {
        return false;
    }
    out.part      = part_id(found - PART_NAMES.begin());
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
