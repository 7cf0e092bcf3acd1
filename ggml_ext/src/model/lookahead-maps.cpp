// SPDX-License-Identifier: MIT
#include "model/lookahead-maps.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

namespace hobbit {

bool lookahead_maps::find(const gguf_file & file, size_t n_layers_of, uint32_t n_experts_of) {
    const auto & tensors = file.tensors();
    const auto   it      = std::find_if(tensors.begin(), tensors.end(), [](auto & t) { return t.name == tensor_name; });
    if (it == tensors.end()) {
        return true;
    }
    const int64_t rows = it->ne[1];
    if (it->type != GGML_TYPE_F16 || rows <= 0 || rows % n_experts_of != 0 || size_t(it->ne[2]) != n_layers_of) {
        return false;
    }
    *this = { file.path(), it->offset, uint32_t(n_layers_of), uint32_t(rows / n_experts_of), n_experts_of, it->ne[0] };
    return true;
}

status lookahead_maps::read(std::vector<ggml_fp16_t> & numbers) const {
    numbers.resize(size_t(width) * n_experts * n_ahead * n_layers);
    errno = 0;
    std::ifstream file(path, std::ios::binary);
    file.seekg(std::streamoff(offset));
    file.read(reinterpret_cast<char *>(numbers.data()), std::streamsize(numbers.size() * sizeof(numbers[0])));
    return file ? status()
                : status::error("cannot read the calibration '%s': %s", path.c_str(),
                                errno ? strerror(errno) : "it has become shorter; calibrate again");
}

} // namespace hobbit
