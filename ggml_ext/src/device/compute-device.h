// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml-backend.h"

#include <string>
#include <vector>

namespace hobbit {

// Chooses the devices that compute experts. Thread-safety: as ggml's registry, which changes when a model with a
// further device is opened.

// The devices with these names, separated by commas; the CPU where `names` is empty. Each of several devices must have
// memory of its own. The error for an unknown name lists the known ones.
status find_compute_devices(const std::string & names, std::vector<ggml_backend_dev_t> & devices);

// The names, for find_compute_devices, of those `devices` that can hold experts and have memory of their own, without
// repetitions. Integrated GPUs are left out, since their memory is the host's. A warning names each other device that
// cannot be used.
std::string usable_devices(const std::vector<ggml_backend_dev_t> & devices);

} // namespace hobbit
