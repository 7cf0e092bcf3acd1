// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace hobbit {

// Assigns each layer to one of several devices. A given assignment stands. The devices take the other layers in runs of
// consecutive layers, in proportion to their free bytes, or evenly if all of these are 0. Pure. REQUIRES: free is not
// empty.
std::vector<uint32_t> assign_layers(const std::vector<std::optional<uint32_t>> & given,
                                    const std::vector<uint64_t> &                free);

} // namespace hobbit
