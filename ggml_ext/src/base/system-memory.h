// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace hobbit {

// Bytes of memory that this process holds now.
uint64_t resident_memory();

// Bytes that this process may still take without swapping or being killed: the minimum of the machine's available
// memory and the free rest of its memory cgroups (v1 or v2).
uint64_t available_memory();

// What one memory cgroup leaves: the limit in its folder `dir`, less its use that cannot be reclaimed from the page
// cache, which memory.stat has under `cache_key`. UINT64_MAX without a limit.
uint64_t cgroup_room(const std::string & dir, const char * limit_file, const char * usage_file, const char * cache_key);

constexpr size_t HUGE_PAGE = 2u << 20;

// The buffer's first address that is a multiple of `alignment`. For a device's memory it is an address of the device.
char * aligned_base(ggml_backend_buffer_t buffer, size_t alignment);

// Asks the system for huge pages: a read into one is a single request, a read into scattered small pages is many. Pages
// that were touched before stay small.
void ask_for_huge_pages(char * base, size_t size);

} // namespace hobbit
