// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml.h"
#include "model/gguf-file.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hobbit {

// Where a calibration stores its linear maps: what to multiply a layer's router input by for the outputs of the routers
// of the n_ahead layers after it.
struct lookahead_maps {
    static constexpr const char * tensor_name = "hobbit.ahead";

    std::string path;
    uint64_t    offset    = 0; // half-precision numbers, [layer][layers ahead][expert][width]
    uint32_t    n_layers  = 0;
    uint32_t    n_ahead   = 0; // 0: there are none
    uint32_t    n_experts = 0;
    int64_t     width     = 0; // values of a router input

    // False where the file's maps are not of a model with these numbers. A file may have none.
    bool find(const gguf_file & file, size_t n_layers, uint32_t n_experts);

    // Fails where the file cannot be read.
    status read(std::vector<ggml_fp16_t> & numbers) const;
};

} // namespace hobbit
