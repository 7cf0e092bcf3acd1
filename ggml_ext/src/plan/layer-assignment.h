// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace hobbit {

// Which of several devices has which layer: the given one, where there is one. The other layers go to the devices in
// runs, one device after the other, in proportion to what each has free; evenly where none says what it has.
// Pure. REQUIRES: free is not empty.
std::vector<uint32_t> assign_layers(const std::vector<std::optional<uint32_t>> & given,
                                    const std::vector<uint64_t> &                free);

} // namespace hobbit
