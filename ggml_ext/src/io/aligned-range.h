// SPDX-License-Identifier: MIT
#pragma once

#include "io/file-reader.h"
#include "model/expert.h"

#include <cstddef>

namespace hobbit {

// Direct I/O reads whole blocks, so a part is read as the smallest aligned range of the file that contains it.

// Where the part begins in that range.
inline size_t data_offset(const part_location & location) {
    return location.offset % file_reader::alignment;
}

// Bytes of that range.
inline size_t aligned_span(const part_location & location) {
    constexpr size_t a = file_reader::alignment;
    return (data_offset(location) + location.size + a - 1) / a * a;
}

} // namespace hobbit
