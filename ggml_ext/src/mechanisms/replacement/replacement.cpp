// SPDX-License-Identifier: MIT
#include "mechanisms/replacement/replacement.h"

#include <algorithm>
#include <optional>
#include <set>

namespace hobbit {

namespace {

class replacement {
  public:
    replacement(const rule_input & in, const std::vector<int32_t> & ranking, std::vector<precision> & precisions) :
        in_(in), ranking_(ranking), routing_(in.routing), precisions_(precisions), served_(routing_.experts) {}

    std::vector<int32_t> run() {
        std::vector<size_t> others; // missing selections but the best of each token
        std::set<int32_t>   fetched;
        for (int64_t t = 0; t < routing_.n_tokens; t++) {
            bool is_best = true;
            for (size_t i = size_t(t * routing_.n_used); i < size_t((t + 1) * routing_.n_used); i++) {
                if (!is_missing(i)) {
                    continue;
                }
                if (is_best) {
                    fetched.insert(served_[i]);
                } else {
                    others.push_back(i);
                }
                is_best = false;
            }
        }
        for (const size_t i : others) {
            if (fetched.count(served_[i]) == 0) {
                replace(i);
            }
        }
        return served_;
    }

  private:
    expert_id id_of(int32_t expert) const { return { routing_.layer, uint32_t(expert) }; }

    bool is_missing(size_t i) const {
        return precisions_[i] != precision::skip && !in_.is_resident(id_of(served_[i]), tier_of(precisions_[i]));
    }

    std::optional<precision> resident(int32_t expert) const {
        if (in_.is_resident(id_of(expert), tier_id::high)) {
            return precision::high;
        }
        return in_.has_low && in_.is_resident(id_of(expert), tier_id::low) ? std::optional(precision::low)
                                                                           : std::nullopt;
    }

    void replace(size_t i) {
        const size_t n_experts = ranking_.size() / size_t(routing_.n_tokens);
        const size_t token     = i / size_t(routing_.n_used);
        const auto   own       = served_.begin() + ptrdiff_t(token * size_t(routing_.n_used));
        const auto   own_end   = own + ptrdiff_t(routing_.n_used);
        const auto   best      = ranking_.begin() + ptrdiff_t(token * n_experts);
        for (auto e = best; e != best + ptrdiff_t(n_experts); e++) {
            const auto found = resident(*e);
            if (found && std::find(own, own_end, *e) == own_end) {
                served_[i]     = *e;
                precisions_[i] = *found;
                return;
            }
        }
    }

    const rule_input &           in_;
    const std::vector<int32_t> & ranking_;
    const layer_routing &        routing_;
    std::vector<precision> &     precisions_;
    std::vector<int32_t>         served_; // [selection]
};

} // namespace

std::vector<int32_t> replace_missing(const rule_input & in, const std::vector<int32_t> & ranking,
                                     std::vector<precision> & precisions) {
    return replacement(in, ranking, precisions).run();
}

} // namespace hobbit
