// SPDX-License-Identifier: MIT
#include "model/stored-paths.h"

#include <algorithm>

namespace hobbit {

static bool are_below(const int32_t * first, size_t n, uint32_t end) {
    return std::all_of(first, first + n, [&](int32_t each) { return each >= 0 && uint32_t(each) < end; });
}

static bool is_valid(const stored_path & p, const std::vector<uint32_t> & n_experts) {
    const bool is_pair = p.n_now == 1 || (p.n_now == 0 && p.n_before == 0);
    if ((p.n_before == 0 && !is_pair) || (p.n_before > 0 && p.n_now == 0) || p.n_tokens == 0) {
        return false;
    }
    const uint32_t depth = (p.n_now > 0) + (p.n_before > 0);
    return p.layer >= depth && p.layer < n_experts.size() &&
           (p.n_now == 0 || are_below(p.now, p.n_now, n_experts[p.layer - 1])) &&
           (p.n_before == 0 || are_below(p.before, p.n_before, n_experts[p.layer - 2])) &&
           std::all_of(
               p.next, p.next + p.n_next,
               [&](int32_t each) {
                   return each >= 0 && uint32_t(each >> 8) < n_experts[p.layer] && (each & 255) <= p.n_tokens;
               });
}

bool each_path(const std::vector<int32_t> & values, const std::vector<uint32_t> & n_experts, const path_visit & visit) {
    constexpr size_t n_head = 5;
    size_t           at     = 0;
    while (values.size() - at >= n_head) {
        const int32_t * head = &values[at];
        if (!are_below(head, n_head, 1u << 16) || head[1] > UINT8_MAX) {
            return false;
        }
        at                 += n_head;
        const size_t n_now = size_t(head[2]), n_before = size_t(head[3]), n_next = size_t(head[4]);
        if (n_now + n_before + n_next > values.size() - at) {
            return false;
        }
        const int32_t *   first = head + n_head;
        const stored_path path  = { uint32_t(head[0]), uint8_t(head[1]),         first, n_now, first + n_now,
                                    n_before,          first + n_now + n_before, n_next };
        if (!is_valid(path, n_experts)) {
            return false;
        }
        visit(path);
        at += n_now + n_before + n_next;
    }
    return at == values.size();
}

} // namespace hobbit
