// SPDX-License-Identifier: MIT
#include "plan/memory-budget.h"

#include "hobbit.h"

#include <algorithm>
#include <iterator>

namespace hobbit {

static constexpr uint64_t MiB = 1024 * 1024;

std::vector<uint32_t> classes_of(const std::vector<uint64_t> & sizes, uint32_t n_experts, uint32_t n_used) {
    std::vector<uint64_t> largest; // [class]
    std::vector<uint64_t> sorted(sizes);
    std::sort(sorted.rbegin(), sorted.rend());
    std::copy_if(sorted.begin(), sorted.end(), std::back_inserter(largest),
                 [&](uint64_t size) { return largest.empty() || size * 20 < largest.back() * 19; });
    if (4 * largest.size() * n_used > sizes.size() * n_experts) {
        largest.resize(1);
    }
    std::vector<uint32_t> numbers;
    for (const uint64_t size : sizes) {
        const auto next = std::upper_bound(largest.begin(), largest.end(), size, std::greater<>());
        numbers.push_back(uint32_t(next - largest.begin() - 1));
    }
    return numbers;
}

uint32_t count_of(const slot_numbers & numbers) {
    return std::accumulate(numbers.begin(), numbers.end(), 0u);
}

slot_numbers slots_in(const slot_classes & classes, uint32_t n_used, uint64_t bytes) {
    uint64_t least = 0;
    uint64_t all   = 0;
    for (const slot_class & c : classes) {
        least += std::min(n_used, c.n_experts) * c.size;
        all   += c.n_experts * c.size;
    }
    const uint64_t rest = std::clamp(bytes, least, all) - least;
    slot_numbers   numbers;
    for (const slot_class & c : classes) {
        const uint32_t n_least = std::min(n_used, c.n_experts);
        numbers.push_back(uint32_t(n_least + rest * (c.n_experts - n_least) / std::max<uint64_t>(all - least, 1)));
    }
    return numbers;
}

bool uses_low(const budget & b, const pool_demand & demand) {
    return demand.all_bytes(tier_id::low) > 0 && (b.low_demand > 0.0 || demand.n_absent > 0);
}

// Thread stacks and what the allocators keep: so much, and a hundredth of the budget.
static constexpr uint64_t SLACK = 8 * MiB;

static uint64_t smallest_pools(const budget & b, const pool_demand & d) {
    return d.least_bytes(tier_id::high) + (uses_low(b, d) ? d.least_bytes(tier_id::low) : 0);
}

static uint64_t largest_pools(const budget & b, const pool_demand & d) {
    return d.all_bytes(tier_id::high) + (uses_low(b, d) ? d.all_bytes(tier_id::low) : 0);
}

static status budget_too_small(const budget & b, uint64_t needed) {
    const uint64_t works = (needed / 99 * 100 / MiB + 2) * MiB; // the memory held before varies from run to run
    return status::error("a memory budget of %s is too small: the smallest that works is %llu MiB",
                         format_size(double(b.memory)).c_str(), (unsigned long long) (works / MiB))
        .because(HOBBIT_SHORT_OF_MEMORY, works);
}

// Device memory that a large pool's operations may need (expert_matmuls).
static constexpr uint64_t WORK_SHARE = 256;

// Memory that a budget must hold beside the pools in host memory.
static uint64_t beside_pools(const other_memory & other) {
    return other.before + other.model + other.scratch + SLACK;
}

status check_limit(const budget & b, bool is_apart, uint64_t beside, uint64_t limit) {
    const uint64_t given = b.memory > 0 || is_apart ? b.memory : b.pools + beside;
    return given <= limit
               ? status()
               : status::error("a limit of %s%s is above the %s that this machine, or the memory cgroup, has "
                               "for the process; lower it",
                               format_size(double(given)).c_str(),
                               b.memory > 0 ? "" : " for expert pools and all beside them",
                               format_size(double(limit)).c_str())
                     .because(HOBBIT_ABOVE_LIMIT);
}

static status check_pools(uint64_t bytes, uint64_t smallest) {
    return bytes >= smallest
               ? status()
               : status::error("expert pools of %llu bytes are too small: the smallest that work are %llu bytes (%s)",
                               (unsigned long long) bytes, (unsigned long long) smallest,
                               format_size(double(smallest)).c_str())
                     .because(HOBBIT_SHORT_OF_POOLS, smallest);
}

static uint64_t least_device_memory(uint64_t rows, uint64_t smallest) {
    return ((rows + smallest) * WORK_SHARE / (WORK_SHARE - 1) / MiB + 1) * MiB;
}

static status device_memory_too_small(uint64_t bytes, uint64_t least) {
    return status::error("device memory of %s is too small: the smallest that works is %llu MiB",
                         format_size(double(bytes)).c_str(), (unsigned long long) (least / MiB))
        .because(HOBBIT_SHORT_OF_DEVICE_MEMORY, least);
}

static status device_pool_bytes(const budget & b, const pool_demand & d, const other_memory & other, uint64_t & bytes) {
    const uint64_t        smallest = smallest_pools(b, d);
    const device_memory & device   = other.device;
    if (b.device_memory > 0) {
        const uint64_t usable = b.device_memory - b.device_memory / WORK_SHARE;
        bytes                 = usable - std::min(usable, device.rows);
        return bytes >= smallest ? status()
                                 : device_memory_too_small(b.device_memory, least_device_memory(device.rows, smallest));
    }
    const uint64_t taken = device.rows + std::max(256 * MiB, device.free / 10);
    bytes                = device.free - std::min(device.free, taken);
    return bytes >= smallest
               ? status()
               : status::error("%s has too little free memory for expert pools: %s are left, the smallest that "
                               "work are %s; free some of it, use a smaller context, or leave the "
                               "experts in host memory with hobbit.device CPU",
                               device.name, format_size(double(bytes)).c_str(), format_size(double(smallest)).c_str())
                     .because(HOBBIT_SHORT_OF_FREE_MEMORY);
}

// Bytes of host memory for experts and snapshots, after everything else.
static uint64_t host_room(const budget & b, const other_memory & other) {
    // other programs have a tenth of what is free, and beside a display at least 2 GiB, or half of it
    const uint64_t on_display = other.has_display ? std::min(2048 * MiB, other.available / 2) : 0;

    uint64_t room  = other.available;
    uint64_t taken = other.scratch + std::max({ 256 * MiB, other.available / 10, on_display });
    if (b.memory > 0) {
        room  = b.memory - b.memory / 100;
        taken = beside_pools(other);
    } else if (other.before + other.model > other.now) {
        taken += other.before + other.model - other.now; // still to come
    }
    return room - std::min(room, taken);
}

// A snapshot saves a conversation from being computed again, and costs every token experts: the first ones, one for
// each of the server's usual slots, may take a third of the room, all together an eighth.
static constexpr uint64_t FIRST_SNAPSHOTS = 4;
static constexpr uint64_t FIRST_SHARE     = 3;
static constexpr uint64_t SNAPSHOT_SHARE  = 8;

// Takes the snapshots' memory out of `room`. The pools keep their minimum unless the least number asks for its memory.
static status take_snapshots(const budget & b, const pool_demand & d, const other_memory & other, uint64_t & room,
                             uint64_t & n) {
    if (other.snapshot == 0) {
        return {};
    }
    const uint64_t smallest = std::min(room, smallest_pools(b, d));
    const uint64_t all      = largest_pools(b, d);
    const uint64_t first    = std::min(room / FIRST_SHARE, FIRST_SNAPSHOTS * other.snapshot);
    const uint64_t share    = std::max({ first, room / SNAPSHOT_SHARE, room - std::min(room, all) });

    n = std::min<uint64_t>(b.snapshots, std::min(share, room - smallest) / other.snapshot);
    n = std::max<uint64_t>(b.least_snapshots, n);
    if (n * other.snapshot > room - smallest) {
        return status::error("%llu context checkpoints of %s take %s, and %s are left for them beside the smallest "
                             "pools: give a smaller --ctx-checkpoints, or more memory",
                             (unsigned long long) n, format_size(double(other.snapshot)).c_str(),
                             format_size(double(n * other.snapshot)).c_str(),
                             format_size(double(room - smallest)).c_str())
            .because(HOBBIT_SHORT_OF_SNAPSHOTS);
    }
    room -= n * other.snapshot;
    return {};
}

static status pool_bytes(const budget & b, const pool_demand & d, const other_memory & other, pool_plan & plan,
                         uint64_t & bytes) {
    const uint64_t smallest = smallest_pools(b, d);
    // where the pools are on a device with memory of its own, the process's budget has to hold everything else
    if (other.device.name && b.memory > 0 && b.memory - b.memory / 100 < beside_pools(other)) {
        return budget_too_small(b, beside_pools(other));
    }
    if (b.pools > 0) {
        bytes          = b.pools;
        uint64_t room  = host_room(b, other);
        room          -= other.device.name ? 0 : std::min(room, bytes);
        HOBBIT_TRY(other.device.name ? status() : take_snapshots(b, {}, other, room, plan.n_snapshots));
        return check_pools(bytes, smallest);
    }
    if (other.device.name) {
        return device_pool_bytes(b, d, other, bytes);
    }
    bytes = host_room(b, other);
    if (bytes >= smallest) {
        return take_snapshots(b, d, other, bytes, plan.n_snapshots);
    }
    return b.memory > 0
               ? budget_too_small(b, beside_pools(other) + smallest)
               : status::error("not enough free memory for expert pools: %s are left, the smallest that work are "
                               "%s; free some memory or use a smaller context",
                               format_size(double(bytes)).c_str(), format_size(double(smallest)).c_str())
                     .because(HOBBIT_SHORT_OF_FREE_MEMORY);
}

// Without a calibrated share the demand divides the pools.
static double low_share(const budget & b, const pool_demand & d) {
    if (b.low_share >= 0) {
        return b.low_share;
    }
    const double absent = double(d.n_absent) / count_of(d.all(tier_id::low)); // their high uses are low
    const double low    = std::min(1.0, b.low_demand + absent) * double(d.all_bytes(tier_id::low));
    return low / (low + double(d.all_bytes(tier_id::high)));
}

pool_slots divide_pools(const budget & b, const pool_demand & d, uint64_t bytes) {
    bytes = std::max(bytes, smallest_pools(b, d));

    const uint64_t all_high = d.all_bytes(tier_id::high);
    slot_numbers   low(d.classes[tier_id::low].size());
    if (uses_low(b, d) && !(b.low_if_short && d.n_absent == 0 && bytes >= all_high)) {
        const uint64_t most     = bytes - d.least_bytes(tier_id::high); // leaves the high pool its smallest
        const uint64_t left     = bytes - std::min(bytes, all_high);    // beside all high versions
        const uint64_t at_least = std::min(d.n_absent > 0 ? left : 0, most);
        const auto     shared   = uint64_t(double(bytes) * low_share(b, d));
        low                     = slots_in(d.classes[tier_id::low], d.n_used, std::clamp(shared, at_least, most));
    }
    return { slots_in(d.classes[tier_id::high], d.n_used, bytes - d.bytes(tier_id::low, low)), low };
}

// Divides a bound: each device gets its minimum and a part of the rest, and nothing of a bound of 0.
static void share(uint64_t bound, uint64_t least_of_all, const std::vector<uint64_t> & least,
                  const std::vector<double> & weights, uint64_t budget::* setting, std::vector<budget> & shared) {
    const double sum  = std::accumulate(weights.begin(), weights.end(), 0.0);
    const double rest = double(bound - least_of_all);
    for (size_t i = 0; i < least.size() && bound > 0; i++) {
        shared[i].*setting = least[i] + (sum > 0 ? uint64_t(rest * weights[i] / sum) : 0);
    }
}

status share_bounds(const budget & b, const std::vector<device_share> & devices, std::vector<budget> & shared) {
    shared.assign(devices.size(), b);
    if (devices.size() == 1) {
        return {};
    }
    std::vector<uint64_t> pools;
    std::vector<uint64_t> memory;
    std::vector<double>   weights; // bytes of each device's experts beyond the smallest pools
    for (const device_share & device : devices) {
        const pool_demand & d        = device.demand;
        const uint64_t      smallest = smallest_pools(b, d);
        pools.push_back(smallest);
        memory.push_back(smallest > 0 ? least_device_memory(device.rows, smallest) : 0);
        weights.push_back(double(largest_pools(b, d) - smallest));
    }
    const uint64_t least_pools  = std::accumulate(pools.begin(), pools.end(), uint64_t(0));
    const uint64_t least_memory = std::accumulate(memory.begin(), memory.end(), uint64_t(0));
    HOBBIT_TRY(b.pools > 0 ? check_pools(b.pools, least_pools) : status());
    if (b.device_memory > 0 && b.device_memory < least_memory) {
        return device_memory_too_small(b.device_memory, least_memory);
    }
    share(b.pools, least_pools, pools, weights, &budget::pools, shared);
    share(b.device_memory, least_memory, memory, weights, &budget::device_memory, shared);
    return {};
}

status plan_pools(const budget & b, const pool_demand & d, const other_memory & other, pool_plan & plan) {
    uint64_t bytes = 0;
    HOBBIT_TRY(check_limit(b, other.device.name, other.before + other.model + other.scratch, other.limit));
    HOBBIT_TRY(pool_bytes(b, d, other, plan, bytes));
    plan.n_slots = divide_pools(b, d, bytes);
    if (other.device.name) {
        const pool_demand & in_host = other.device.host;
        uint64_t            room    = host_room(b, other);
        HOBBIT_TRY(take_snapshots(b, in_host, other, room, plan.n_snapshots));
        plan.n_host_slots = room < smallest_pools(b, in_host) ? pool_slots() : divide_pools(b, in_host, room);
    }
    return {};
}

std::vector<uint32_t> assign_layers(const std::vector<std::optional<uint32_t>> & given,
                                    const std::vector<uint64_t> &                free) {
    std::vector<double> ends(free.begin(), free.end());
    if (std::all_of(free.begin(), free.end(), [](uint64_t bytes) { return bytes == 0; })) {
        ends.assign(free.size(), 1.0);
    }
    std::partial_sum(ends.begin(), ends.end(), ends.begin());

    const auto            n_loose = double(std::count(given.begin(), given.end(), std::nullopt));
    std::vector<uint32_t> spread;
    double                n_spread = 0.0;
    for (const std::optional<uint32_t> & device : given) {
        if (device) {
            spread.push_back(*device);
            continue;
        }
        const double middle = ends.back() * (n_spread + 0.5) / n_loose;
        spread.push_back(uint32_t(std::upper_bound(ends.begin(), ends.end(), middle) - ends.begin()));
        n_spread += 1.0;
    }
    return spread;
}

} // namespace hobbit
