// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <string>

namespace hobbit {

// Where /proc and /sys are found, "" at first: for tests, which make a machine of their own. Not thread-safe.
void set_system_root(const std::string & folder);

// Returns true where people run programs on a display: the environment names one, or an X server has a socket.
bool has_display();

constexpr size_t HUGE_PAGE = 2u << 20; // with pages of 4 KiB; larger pages need no larger ones

// The first byte of the page that holds this one. A page may have 4, 16 or 64 KiB.
char * page_of(char * address);

// The buffer's first address that is a multiple of `alignment`. For a device's memory it is an address of the device.
char * aligned_base(ggml_backend_buffer_t buffer, size_t alignment);

} // namespace hobbit
