// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace hobbit {

struct expert_id {
    uint32_t layer;
    uint32_t expert;

    bool operator==(const expert_id & other) const { return layer == other.layer && expert == other.expert; }
};

// Decides which expert leaves one pool. Pure: no clock, lock or I/O, so that a simulator can drive the same object.
// The cache calls on_insert and on_evict in pairs, on_use for every use (after on_insert where it was a miss).
class cache_policy {
  public:
    virtual ~cache_policy() = default;

    virtual void on_use(expert_id id)    = 0;
    virtual void on_insert(expert_id id) = 0;
    virtual void on_evict(expert_id id)  = 0;

    // Index of the expert to evict so that one of layer `layer` fits.
    // REQUIRES: evictable is not empty and holds only inserted experts.
    virtual size_t pick_victim(const std::vector<expert_id> & evictable, uint32_t layer) const = 0;
};

// Least recently used first, but a layer that holds no more than its floor loses none to another layer. Without floors
// a pool smaller than one token's cycle through all layers never hits; with them each layer keeps what it last used.
class lru_policy final : public cache_policy {
  public:
    lru_policy(uint32_t n_layers, uint32_t n_experts, uint32_t floor);

    void   on_use(expert_id id) override;
    void   on_insert(expert_id id) override;
    void   on_evict(expert_id id) override;
    size_t pick_victim(const std::vector<expert_id> & evictable, uint32_t layer) const override;

  private:
    uint64_t last_use(expert_id id) const { return last_use_[size_t(id.layer) * n_experts_ + id.expert]; }

    const uint32_t        n_experts_;
    const uint32_t        floor_;
    std::vector<uint64_t> last_use_; // [layer * n_experts + expert], in uses
    std::vector<uint32_t> held_;     // [layer]
    uint64_t              n_uses_ = 0;
};

// The largest floor, no more than one token's `n_used` experts, that all other layers can keep while one layer holds
// all that it uses. A higher one would be broken by each layer in turn, at the expense of the next: again nothing hits.
uint32_t even_floor(uint32_t n_slots, uint32_t n_layers, uint32_t n_used);

} // namespace hobbit
