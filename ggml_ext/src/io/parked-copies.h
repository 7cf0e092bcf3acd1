// SPDX-License-Identifier: MIT
#pragma once

#include "io/chunk-queue.h"
#include "model/expert.h"

#include <vector>

namespace hobbit {

// Chunks to copy to devices whose source, a part in host memory, is still being read.
//
// Thread-safety: none.
class parked_copies {
  public:
    struct parked {
        chunk              what;
        const load_state * from;
        load_urgency       urgency;
    };

    // `from`: of the source. The chunks' own state is that of the destination.
    void park(const std::vector<chunk> & chunks, const load_state & from, load_urgency urgency);

    // Turns the prefetches of a part into demands.
    void promote(const load_state & state, part_id part);

    // Removes what waits for the part of `from`.
    std::vector<parked> take(const load_state & from, part_id part);

    // Removes the prefetches of `parts`.
    std::vector<parked> drop_prefetches(const load_state & state, part_set parts);

    // Removes all.
    std::vector<parked> clear();

  private:
    template <typename predicate>
    std::vector<parked> remove(predicate is_removed);

    std::vector<parked> all_;
};

} // namespace hobbit
