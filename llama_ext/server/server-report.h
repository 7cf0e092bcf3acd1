// SPDX-License-Identifier: MIT
#pragma once

// The expert cache of the model that the server has loaded: its counters, for other hooks. Any thread may call these.

#include <cstdint>
#include <utility>

// Has the model an expert cache?
bool server_report_is_cached();

// Bytes that the checkpoints of all slots may take; without an expert cache no bound.
uint64_t server_report_checkpoint_bytes();

// Layers that were computed, and those of a graph that the cache computes; 0 without an expert cache.
std::pair<double, int32_t> server_report_layers();
