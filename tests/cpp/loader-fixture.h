// SPDX-License-Identifier: MIT
#pragma once

#include "fake-reader.h"
#include "loader.h"

#include <cstddef>
#include <cstdint>
#include <vector>

using namespace hobbit;

constexpr size_t BLOCK = file_reader::alignment;

// Block number `block` of file 0, whole.
inline part_location block_at(uint64_t block, size_t n_blocks = 1) {
    return { 0, block * BLOCK, n_blocks * BLOCK, GGML_TYPE_F32 };
}

// Memory for one block each, at the alignment that the loader asks for.
class blocks {
  public:
    explicit blocks(size_t n) : memory_((n + 1) * BLOCK) {
        base_ = memory_.data() + (BLOCK - uintptr_t(memory_.data()) % BLOCK) % BLOCK;
    }

    char * operator[](size_t i) { return base_ + i * BLOCK; }

  private:
    std::vector<char> memory_;
    char *            base_;
};
