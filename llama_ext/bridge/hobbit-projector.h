// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

extern "C" {

// Bytes of host memory that a projector (mmproj) will hold, with the buffers for an image of the usual size, by
// llama.cpp's own arithmetic: its weights are not read. 0 where the file is none, which the log explains. n_embd: gets
// the size of what it makes of a part of an image.
uint64_t hobbit_projector_bytes(const char * path, int32_t * n_embd);
}
