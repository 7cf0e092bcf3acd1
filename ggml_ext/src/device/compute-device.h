// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml-backend.h"

#include <string>
#include <vector>

namespace hobbit {

// The devices that experts are computed on. Thread-safety: as ggml's registry, which opening a model with a further
// device changes.

// The devices of these names, which commas separate, the CPU where there is none; an error names those there are.
// Several have memory of their own each.
status find_compute_devices(const std::string & names, std::vector<ggml_backend_dev_t> & devices);

// Those of these devices, each once, that experts can be on and that have memory of their own, as names for
// find_compute_devices; not integrated GPUs, whose memory is the host's. Of others that cannot be used it warns.
std::string usable_devices(const std::vector<ggml_backend_dev_t> & devices);

// Whether the device computes in host memory: what lies there is used in place.
bool is_host_device(ggml_backend_dev_t device);

// Whether each of ggml's backends on the device is a stream of its own, in which copies pass what another computes.
bool has_streams(ggml_backend_dev_t device);

// Whether it is behind a connection, on which copies stand in line with what it is asked to compute.
bool is_remote(ggml_backend_dev_t device);

// Of so many threads of the CPU those that compute beside the device: who copies to it may wait actively, in CUDA's
// driver for one, and where that takes a core from these they wait for each other.
int threads_beside(ggml_backend_dev_t device, int n_threads);

// Bytes of the device's memory; 0 where it does not say.
size_t free_memory(ggml_backend_dev_t device);

} // namespace hobbit
