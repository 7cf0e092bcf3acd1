// SPDX-License-Identifier: MIT
#include "model/use-counts.h"

#include "gguf.h"
#include "model/gguf-file.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <sys/stat.h>
#include <unistd.h>

namespace hobbit {

static constexpr const char * COUNTS      = "hobbit.expert_uses";
static constexpr const char * MODEL_BYTES = "hobbit.model_bytes";

use_counts::use_counts(std::vector<uint32_t> n_used, uint32_t n_experts) :
    n_used_(std::move(n_used)),
    n_experts_(n_experts),
    counts_(n_used_.size() * n_experts, 0),
    sums_(n_used_.size(), 0) {}

//
// counting
//

void use_counts::halve(layer_id layer) {
    int32_t * const first = &counts_[size_t(layer) * n_experts_];
    while (sums_[layer] > most_tokens * n_used_[layer]) {
        std::for_each(first, first + n_experts_, [](int32_t & n) { n /= 2; });
        sums_[layer] = std::accumulate(first, first + n_experts_, int64_t(0));
    }
}

void use_counts::add(layer_id layer, const std::vector<int32_t> & experts) {
    for (const int32_t expert : experts) {
        counts_[size_t(layer) * n_experts_ + size_t(expert)]++;
    }
    sums_[layer] += int64_t(experts.size());
    halve(layer);
}

void use_counts::add(const std::vector<int32_t> & counts) {
    for (layer_id layer = 0; layer < n_used_.size(); layer++) {
        const auto      first = counts.begin() + ptrdiff_t(size_t(layer) * n_experts_);
        const int64_t   sum   = std::accumulate(first, first + n_experts_, int64_t(0));
        const int64_t   scale = 1 + sum / (most_tokens * n_used_[layer]); // before the sum, for 32 bits
        int32_t * const own   = &counts_[size_t(layer) * n_experts_];
        for (uint32_t e = 0; e < n_experts_; e++) {
            own[e]       += int32_t(first[e] / scale);
            sums_[layer] += first[e] / scale;
        }
        halve(layer);
    }
}

expert_table<float> use_counts::rates() const {
    if (std::all_of(sums_.begin(), sums_.end(), [](int64_t sum) { return sum == 0; })) {
        return {};
    }
    expert_table<float> rates(n_used_.size(), n_experts_);
    for (layer_id layer = 0; layer < n_used_.size(); layer++) {
        for (uint32_t e = 0; e < n_experts_ && sums_[layer] > 0; e++) {
            rates[{ layer, e }] =
                float(counts_[size_t(layer) * n_experts_ + e]) * float(n_used_[layer]) / float(sums_[layer]);
        }
    }
    return rates;
}

std::vector<expert_id> most_used(const expert_table<float> & rates) {
    std::vector<expert_id> used;
    for (size_t i = 0; i < rates.size(); i++) {
        if (rates[rates.id(i)] > 0) {
            used.push_back(rates.id(i));
        }
    }
    std::stable_sort(used.begin(), used.end(), [&](expert_id a, expert_id b) { return rates[a] > rates[b]; });
    return used;
}

//
// the file
//

status use_counts::read(const std::string & path, uint64_t model_bytes) {
    struct stat st;
    if (stat(path.c_str(), &st) != 0) {
        return {};
    }
    gguf_file            file;
    uint64_t             bytes = 0;
    std::vector<int32_t> counts;
    HOBBIT_TRY(file.open(path));
    if (!file.find_u64(MODEL_BYTES, bytes) || !file.find_ints(COUNTS, counts) || bytes != model_bytes ||
        counts.size() != counts_.size() || std::any_of(counts.begin(), counts.end(), [](int32_t n) { return n < 0; })) {
        return status::error("'%s' does not count the uses of this model's experts", path.c_str());
    }
    add(counts);
    return {};
}

status use_counts::write(const std::string & path, uint64_t model_bytes) const {
    static std::atomic<uint32_t> n_written{ 0 };
    const std::string            part = format("%s.%d-%u.part", path.c_str(), int(getpid()), n_written++);

    std::unique_ptr<gguf_context, void (*)(gguf_context *)> keys(gguf_init_empty(), gguf_free);
    gguf_set_val_u64(keys.get(), MODEL_BYTES, model_bytes);
    gguf_set_arr_data(keys.get(), COUNTS, GGUF_TYPE_INT32, counts_.data(), counts_.size());

    errno                   = 0;
    FILE * const out        = fopen(part.c_str(), "wb");
    const bool   is_written = out && gguf_write_to_file_ptr(keys.get(), out, /* only_meta = */ true);
    const bool   is_closed  = out && fclose(out) == 0;
    if (is_written && is_closed && rename(part.c_str(), path.c_str()) == 0) {
        return {};
    }
    const int error = errno ? errno : EIO; // not every failed write sets it
    if (out) {
        unlink(part.c_str());
    }
    return status::error("'%s' cannot be written: %s", path.c_str(), strerror(error));
}

} // namespace hobbit
