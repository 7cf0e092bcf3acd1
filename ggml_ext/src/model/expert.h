// SPDX-License-Identifier: MIT
#pragma once

#include "base/id-array.h"
#include "ggml.h"

#include <array>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

// The nouns of the code base: an expert, its matrices (parts), its versions (tiers), and where a matrix lies in a file.
// Each has a type of its own, so that mixing them up does not compile.

namespace hobbit {

// A layer with routed experts; layers are numbered from 0 without gaps. An int (a literal) converts to a layer, and a
// layer to an index of arrays. An unsigned number, such as an expert's, does not convert to a layer.
class layer_id {
  public:
    constexpr layer_id() = default;

    template <typename T, std::enable_if_t<std::is_same_v<T, int>, int> = 0>
    constexpr layer_id(T number) : number_(uint32_t(number)) {}

    template <typename T, std::enable_if_t<std::is_unsigned_v<T>, int> = 0>
    constexpr explicit layer_id(T number) : number_(uint32_t(number)) {}

    constexpr operator uint32_t() const { return number_; }

    layer_id operator++(int) { return layer_id(number_++); }

  private:
    uint32_t number_ = 0;
};

struct expert_id {
    layer_id layer;
    uint32_t expert;

    bool operator==(const expert_id & other) const { return layer == other.layer && expert == other.expert; }
};

// A value for each expert of all layers.
template <typename T>
class expert_table {
  public:
    expert_table() = default;
    expert_table(size_t n_layers, uint32_t n_experts, T value = {}) :
        n_experts_(n_experts), values_(n_layers * n_experts, std::move(value)) {}

    T &       operator[](expert_id id) { return values_[size_t(id.layer) * n_experts_ + id.expert]; }
    const T & operator[](expert_id id) const { return values_[size_t(id.layer) * n_experts_ + id.expert]; }

    auto begin() { return values_.begin(); }
    auto end() { return values_.end(); }
    auto begin() const { return values_.begin(); }
    auto end() const { return values_.end(); }

    size_t size() const { return values_.size(); }
    bool   empty() const { return values_.empty(); }

    // The expert of the i-th value.
    expert_id id(size_t i) const { return { layer_id(uint32_t(i / n_experts_)), uint32_t(i % n_experts_) }; }

  private:
    uint32_t       n_experts_ = 0; // per layer
    std::vector<T> values_;
};

// The weight matrices of one expert. A layer has either gate (optional) and up, or both fused in gate_up; and down.
enum class part_id : uint32_t { gate, up, gate_up, down };

template <typename T>
using per_part = id_array<part_id, T, 4>;

// A set of parts, which a loop over it visits in their order.
class part_set {
  public:
    constexpr part_set() = default;

    constexpr part_set(part_id part) : bits_(1u << uint32_t(part)) {}

    static constexpr part_set all() { return part_set((1u << 4) - 1); }

    constexpr explicit operator bool() const { return bits_ != 0; } // true if there are any

    constexpr bool has(part_set parts) const { return (bits_ & parts.bits_) == parts.bits_; } // all of them

    constexpr bool operator==(part_set o) const { return bits_ == o.bits_; }
    constexpr bool operator!=(part_set o) const { return bits_ != o.bits_; }

    friend constexpr part_set operator|(part_set a, part_set b) { return part_set(a.bits_ | b.bits_); }
    friend constexpr part_set operator&(part_set a, part_set b) { return part_set(a.bits_ & b.bits_); }
    friend constexpr part_set operator-(part_set a, part_set b) { return part_set(a.bits_ & ~b.bits_); }

    part_set & operator|=(part_set o) { return *this = *this | o; }
    part_set & operator-=(part_set o) { return *this = *this - o; }

    struct iterator {
        uint32_t left;

        part_id operator*() const { return part_id(__builtin_ctz(left)); }
        void    operator++() { left &= left - 1; }
        bool    operator!=(iterator o) const { return left != o.left; }
    };

    iterator begin() const { return { bits_ }; }
    iterator end() const { return { 0 }; }

  private:
    constexpr explicit part_set(uint32_t bits) : bits_(bits) {}

    uint32_t bits_ = 0;
};

constexpr part_set operator|(part_id a, part_id b) {
    return part_set(a) | part_set(b);
}

// Versions of the experts.
enum class tier_id : uint32_t { high, low };

constexpr std::array<tier_id, 2> TIERS = { tier_id::high, tier_id::low };

template <typename T>
using per_tier = id_array<tier_id, T, TIERS.size()>;

constexpr const char * tier_name(tier_id tier) {
    return tier == tier_id::high ? "high" : "low";
}

// A version of an expert.
struct expert_tier {
    expert_id id;
    tier_id   tier;
};

// How an expert serves a selection, from worst to best.
enum class precision { skip, low, high };

// The precision in which a file serves an expert where a rule gives one. Empty: the same.
using serving = std::function<precision(expert_id id, precision given)>;

// REQUIRES: not skip
constexpr tier_id tier_of(precision p) {
    return p == precision::high ? tier_id::high : tier_id::low;
}

// One expert's matrix in a file.
struct part_location {
    uint32_t  file   = 0; // index into expert_index::files()
    uint64_t  offset = 0;
    uint64_t  size   = 0;
    ggml_type type   = GGML_TYPE_COUNT;
};

struct matrix_shape {
    int64_t n_in  = 0;
    int64_t n_out = 0;
};

// Meaning of a routed expert tensor in a ggml graph. The cache's buffer type keeps it in the tensor's `extra`.
struct expert_tensor {
    layer_id layer;
    part_id  part = {};
};

} // namespace hobbit
