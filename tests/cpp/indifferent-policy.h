// SPDX-License-Identifier: MIT
#pragma once

#include "cache-policy.h"

#include <cstdint>

// All experts are worth the same: the least recently touched one leaves.
class indifferent_policy : public hobbit::cache_policy {
  public:
    void begin_sequence(uint32_t) override {}

    void begin_tokens(uint32_t, uint32_t) override {}

    void on_use(const hobbit::expert_usage &) override {}

    double value(hobbit::expert_id, uint32_t, uint32_t) override { return 0.0; }
};
