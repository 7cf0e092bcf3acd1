// SPDX-License-Identifier: MIT
#include "io/chunk-queue.h"

#include <algorithm>

namespace hobbit {

static bool are_of_one_part(const chunk & a, const chunk & b) {
    return a.is_of(*b.state, b.part);
}

void chunk_queue::push(const std::vector<chunk> & chunks, load_urgency urgency) {
    const bool          is_demand = urgency == load_urgency::demand;
    std::deque<chunk> & queue     = is_demand ? demand_ : prefetch_;
    queue.insert(queue.end(), chunks.begin(), chunks.end());
    n_demands_ += is_demand ? chunks.size() : 0;
}

bool chunk_queue::take(size_t max_bytes, std::vector<chunk> & taken) {
    taken.clear();
    const bool is_demand = !demand_.empty();
    if (!is_demand && (prefetch_.empty() || prefetching_.size() >= max_prefetches_)) {
        return false;
    }
    std::deque<chunk> & queue = is_demand ? demand_ : prefetch_;
    size_t              bytes = 0;
    do {
        taken.push_back(queue.front());
        taken.back().state->begun |= taken.back().part;
        bytes                     += taken.back().size;
        queue.pop_front();
    } while (!queue.empty() && bytes + queue.front().size <= max_bytes &&
             (is_demand || are_of_one_part(queue.front(), taken.front())));
    if (!is_demand) {
        prefetching_.insert(prefetching_.end(), taken.begin(), taken.end());
    }
    return true;
}

bool chunk_queue::end(const chunk & done) {
    const auto is_alike = [&](const chunk & c) { return are_of_one_part(c, done); };
    const auto found    = std::find_if(prefetching_.begin(), prefetching_.end(), is_alike); // which one is all the same
    if (found == prefetching_.end()) {
        n_demands_--;
        return false;
    }
    prefetching_.erase(found);
    return true;
}

size_t chunk_queue::promote(const load_state & state, part_id part) {
    const auto is_kept = [&](const chunk & c) { return !c.is_of(state, part); };
    const auto first   = std::stable_partition(prefetching_.begin(), prefetching_.end(), is_kept);
    auto       n       = size_t(prefetching_.end() - first);
    prefetching_.erase(first, prefetching_.end());
    const std::vector<chunk> queued = drop_prefetches(state, part);
    demand_.insert(demand_.end(), queued.begin(), queued.end());
    n          += queued.size();
    n_demands_ += n;
    return n;
}

std::vector<chunk> chunk_queue::drop_prefetches(const load_state & state, part_set parts) {
    const auto               is_kept = [&](const chunk & c) { return !c.is_of(state, parts); };
    const auto               first   = std::stable_partition(prefetch_.begin(), prefetch_.end(), is_kept);
    const std::vector<chunk> dropped(first, prefetch_.end());
    prefetch_.erase(first, prefetch_.end());
    return dropped;
}

std::vector<chunk> chunk_queue::clear() {
    std::vector<chunk> all(demand_.begin(), demand_.end());
    all.insert(all.end(), prefetch_.begin(), prefetch_.end());
    n_demands_ -= demand_.size();
    demand_.clear();
    prefetch_.clear();
    return all;
}

} // namespace hobbit
