// SPDX-License-Identifier: MIT
#include "model/llama-header.h"

#include "hobbit.h"

#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

uint32_t hobbit_max_experts(void) {
    return LLAMA_MAX_EXPERTS;
}

namespace hobbit {

// llama.cpp ends the process if a count is out of range.
static status check_counts(const gguf_file & file, const std::string & arch) {
    const auto read = [&](const char * key, double missing) {
        double value = 0;
        return file.find_number(arch + key, value) ? value : missing;
    };
    const double n_layers  = read(".block_count", 1);
    const double n_experts = read(".expert_count", 0);
    const double n_used    = read(".expert_used_count", 0);
    const double epsilon   = read(".attention.layer_norm_rms_epsilon", 0);
    if (n_layers > LLAMA_MAX_LAYERS || n_experts > LLAMA_MAX_EXPERTS) {
        return status::
            error("'%s' has %g layers of %g experts by its header, and this llama.cpp runs at most %d layers "
                  "of %d experts: use another model, or a later version",
                  file.path().c_str(), n_layers, n_experts, LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS);
    }
    const bool is_sound = n_layers >= 1 && n_experts >= 0 && n_used >= 0 && n_used <= n_experts &&
                          (n_experts == 0 || n_used >= 1) && epsilon >= 0;
    return is_sound ? status()
                    : status::error(format("'%s' is damaged: its header has %g layers, %g experts, %g of them used per "
                                           "token, and an epsilon of %g; download or convert it again",
                                           file.path().c_str(), n_layers, n_experts, n_used, epsilon));
}

// llama.cpp ends the process where two tokens have one text. hybriddna's may: it tells them apart by itself.
static status check_vocabulary(const gguf_file & file) {
    std::string                   kind;
    std::vector<std::string_view> tokens;
    if ((file.find_string("tokenizer.ggml.model", kind) && kind == "hybriddna") ||
        !file.find_strings("tokenizer.ggml.tokens", tokens)) {
        return {};
    }
    std::unordered_set<std::string_view> seen(tokens.size());
    for (const std::string_view token : tokens) {
        if (!token.empty() && !seen.insert(token).second) {
            return status::
                error("'%s' is damaged: its vocabulary has the token '%s' twice; download or convert it again",
                      file.path().c_str(), token.data());
        }
    }
    return {};
}

status check_llama_header(const gguf_file & file) {
    HOBBIT_TRY(check_vocabulary(file));
    std::string arch;
    return file.find_string("general.architecture", arch) ? check_counts(file, arch) : status();
}

} // namespace hobbit
