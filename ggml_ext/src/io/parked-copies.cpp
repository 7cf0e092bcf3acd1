// SPDX-License-Identifier: MIT
#include "io/parked-copies.h"

#include <algorithm>
#include <functional>

namespace hobbit {

void parked_copies::park(const std::vector<chunk> & chunks, const load_state & from, load_urgency urgency) {
    for (const chunk & c : chunks) {
        all_.push_back({ c, &from, urgency });
    }
}

void parked_copies::promote(const load_state & state, part_id part) {
    for (parked & p : all_) {
        p.urgency = p.what.is_of(state, part) ? load_urgency::demand : p.urgency;
    }
}

template <typename predicate>
std::vector<parked_copies::parked> parked_copies::remove(predicate is_removed) {
    const auto                first = std::stable_partition(all_.begin(), all_.end(), std::not_fn(is_removed));
    const std::vector<parked> removed(first, all_.end());
    all_.erase(first, all_.end());
    return removed;
}

std::vector<parked_copies::parked> parked_copies::take(const load_state & from, part_id part) {
    return remove([&](const parked & p) { return p.from == &from && p.what.part == part; });
}

std::vector<parked_copies::parked> parked_copies::drop_prefetches(const load_state & state, part_set parts) {
    return remove([&](const parked & p) { return p.urgency == load_urgency::prefetch && p.what.is_of(state, parts); });
}

std::vector<parked_copies::parked> parked_copies::clear() {
    return remove([](const parked &) { return true; });
}

} // namespace hobbit
