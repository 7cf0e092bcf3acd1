// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "gguf.h"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace hobbit {

// The metadata and the tensor table of one GGUF file; no weight is read. Immutable after open.
class gguf_file {
  public:
    struct tensor {
        std::string name;
        ggml_type   type;
        int64_t     ne[3];
        uint64_t    offset; // from the start of the file
        uint64_t    size;
    };

    // Fails unless every tensor lies within the file; the reason is a hobbit_header_fault. data: the first bytes of a
    // file of `size`, which are read in its place.
    status open(const std::string & path, std::string_view data = {}, uint64_t size = 0);

    size_t header_bytes() const;

    const std::string &         path() const { return path_; }
    uint64_t                    size() const { return size_; }
    const std::vector<tensor> & tensors() const { return tensors_; }

    bool has(const std::string & key) const;

    // Numbers and booleans of any width; of an array, its largest element. False where absent or of another kind.
    bool find_number(const std::string & key, double & value) const;
    bool find_u64(const std::string & key, uint64_t & value) const;
    bool find_string(const std::string & key, std::string & value) const;
    bool find_strings(const std::string & key, std::vector<std::string_view> & values) const; // in the file's memory

    // 32-bit integers or floats, as T is.
    template <typename T>
    bool find_array(const std::string & key, std::vector<T> & values) const {
        const int64_t id = find(key, GGUF_TYPE_ARRAY, std::is_integral_v<T> ? GGUF_TYPE_INT32 : GGUF_TYPE_FLOAT32);
        if (id >= 0) {
            const auto * data = static_cast<const T *>(gguf_get_arr_data(gguf_.get(), id));
            values.assign(data, data + gguf_get_arr_n(gguf_.get(), id));
        }
        return id >= 0;
    }

  private:
    status read_header(std::string_view data);

    // -1: there is none. element: type of an array's elements
    int64_t find(const std::string & key, int type, int element = GGUF_TYPE_COUNT) const;

    std::string                                             path_;
    uint64_t                                                size_ = 0;
    std::vector<tensor>                                     tensors_;
    std::unique_ptr<gguf_context, void (*)(gguf_context *)> gguf_{ nullptr, gguf_free };
};

// The path of a model's first part; see hobbit_first_part.
std::string first_part(const std::string & path);

// Opens `path` and, where it is the first part of a split model, the other parts.
status open_gguf_model(const std::string & path, std::vector<gguf_file> & files);

// Refuses counts of layers and experts, and an epsilon, that llama.cpp cannot run.
status check_llama_header(const gguf_file & file);

} // namespace hobbit
