// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace hobbit {

// Where /proc and /sys are found, "" at first: for tests, which make a machine of their own. Not thread-safe.
void set_system_root(const std::string & folder);

// /proc/meminfo of the machine that this process sees.
std::string meminfo_path();

// Bytes of memory that this process holds now.
uint64_t resident_memory();

// Bytes that this process may still take without swapping or being killed: the minimum of the machine's available
// memory and the free rest of its memory cgroups (v1 or v2).
uint64_t available_memory();

// Bytes that this process could take at most: the machine's memory, or less by the limit of a memory cgroup.
uint64_t memory_limit();

// Returns true where people run programs on a display: the environment names one, or an X server has a socket.
bool has_display();

constexpr size_t HUGE_PAGE = 2u << 20; // with pages of 4 KiB; larger pages need no larger ones

// The first byte of the page that holds this one. A page may have 4, 16 or 64 KiB.
char * page_of(char * address);

// The buffer's first address that is a multiple of `alignment`. For a device's memory it is an address of the device.
char * aligned_base(ggml_backend_buffer_t buffer, size_t alignment);

} // namespace hobbit
