// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>

namespace hobbit {

// Memory that this process holds now.
uint64_t resident_memory();

// Memory that this process may still take without anything being swapped out or killed: the least of what the machine
// has available and what its memory cgroups (v1 or v2) leave.
uint64_t available_memory();

constexpr size_t HUGE_PAGE = 2u << 20;

// The buffer's first address that is a multiple of `alignment`; of a device's memory, as the device counts.
char * aligned_base(ggml_backend_buffer_t buffer, size_t alignment);

// Asks for huge pages, where the system has any: a disk reads into one in one piece, and into small pages, which are
// scattered, in many. What was touched before stays as it is.
void ask_for_huge_pages(char * base, size_t size);

} // namespace hobbit
