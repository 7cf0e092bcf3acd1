// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace modelled {

using ns_t = int64_t; // virtual nanoseconds

// Prices of one machine, as a price file names them: microseconds (_us), GB/s (_gbs, which are bytes per ns). Columns:
// name, default, meaning.
#define MODELLED_PRICES(PRICE)                                                                                         \
    PRICE(lock_us, 0, "code around a lock: a price that is the same each time")                                        \
    PRICE(wake_us, 5, "from a signal to the thread that it wakes")                                                     \
    PRICE(copy_call_us, 6, "host time to start a copy")                                                                \
    PRICE(launch_us, 3, "host time to start one kernel")                                                               \
    PRICE(replay_us, 9, "host time to start a captured graph")                                                         \
    PRICE(capture_us, 60, "beside its kernels' launches, host time to capture a graph")                                \
    PRICE(event_us, 1, "host time to record an event or to let a stream wait for it")                                  \
    PRICE(sync_us, 8, "from the end of a stream's work to the host's return")                                          \
    PRICE(idle_sync_us, 2, "a wait where nothing runs")                                                                \
    PRICE(kernel_us, 2, "on the device, beside its bytes")                                                             \
    PRICE(copy_us, 8, "latency of a copy, beside its bytes")                                                           \
    PRICE(gap_us, 1, "time between two copies on the link")                                                            \
    PRICE(region_us, 25, "until the CPU's threads compute, and have ended")                                            \
    PRICE(cpu_node_us, 2, "an operation of the CPU's, beside its bytes")                                               \
    PRICE(device_gbs, 800, "")                                                                                         \
    PRICE(link_gbs, 25, "from page-locked memory")                                                                     \
    PRICE(link_busy_gbs, 22, "while the CPU reads experts")                                                            \
    PRICE(pageable_gbs, 8, "")                                                                                         \
    PRICE(cpu_gbs, 50, "")                                                                                             \
    PRICE(cpu_busy_gbs, 44, "while the link copies")                                                                   \
    PRICE(disk_gbs, 0, "to a thread that reads the model's file; 0: a read takes no time")                             \
    PRICE(fault_gbs, 0, "to who uses a mapped file that the page cache has not; 0: no time")                           \
    PRICE(cache_gb, 0, "of the page cache")                                                                            \
    PRICE(host_gb, 128, "memory that the machine says to have")                                                        \
    PRICE(captures, 1, "0: each kernel of a graph is started each time")                                               \
    PRICE(one_queue, 0, "1: copies and graphs of all streams run one after the other")

struct prices {
#define PRICE(name, value, about) double name = value;
    MODELLED_PRICES(PRICE)
#undef PRICE

    static constexpr std::pair<const char *, double prices::*> fields[] = {
#define PRICE(name, value, about) { #name, &prices::name },
        MODELLED_PRICES(PRICE)
#undef PRICE
    };
};

enum class resource { device, to_device, to_host, cpu, disk };

// Sums since the clock was made.
struct costs {
    uint64_t launches = 0, replays = 0, waits = 0, copies = 0, reads = 0, copied_bytes = 0;
};

// Decides when things run on a machine with one CPU, one link and one device: host threads and streams have a time of
// their own, and the device, the CPU's cores and each direction of the link do one thing at a time. A host thread is
// given as the time that it has reached, which a call advances.
//
// Thread-safety: none. Pure: no clock but this one.
class virtual_clock {
  public:
    struct stream {
        ns_t now = 0;
    };

    struct interval {
        ns_t     begin;
        ns_t     end;
        resource on;
    };

    // How a graph is started.
    enum class start { direct, capture, replay };

    explicit virtual_clock(const prices & p) : p_(p) {}

    const prices & price() const { return p_; }

    // Host code has taken a lock.
    void lock(ns_t & host) { host += us(p_.lock_us); }

    // A copy in a stream. From ordinary memory the call returns when it has ended.
    void copy(ns_t & host, stream & s, resource link, uint64_t bytes, bool is_pinned) {
        host += us(p_.copy_call_us);
        begin_copy(host, s, link, bytes, is_pinned);
        if (!is_pinned) {
            wait(host, s.now, 0);
        }
    }

    // A copy that the host waits for.
    void copy_and_wait(ns_t & host, resource link, uint64_t bytes, bool is_pinned) {
        stream own;
        host += us(p_.copy_call_us);
        begin_copy(host, own, link, bytes, is_pinned);
        synchronize(host, own);
    }

    // A graph of kernels that keep the device busy for so long, with their gaps.
    void compute(ns_t & host, stream & s, start how, uint64_t n_kernels, ns_t busy) {
        const ns_t called = host;
        const ns_t first  = us(how == start::direct ? p_.launch_us : p_.replay_us);
        if (how != start::replay) {
            host += us(double(n_kernels) * p_.launch_us);
        }
        if (how != start::direct) {
            host += us(p_.replay_us + (how == start::capture ? p_.capture_us : 0));
        }
        sums_.launches += n_kernels > 0;
        sums_.replays  += how == start::replay;
        ns_t & free     = free_of(resource::device);
        // without capture the device may wait for the launch of each kernel
        const ns_t begin   = std::max({ s.now, free, how == start::direct ? called + first : host });
        const ns_t slowest = how == start::direct ? host + busy / ns_t(std::max<uint64_t>(n_kernels, 1)) : 0;
        free = s.now = std::max(begin + busy, slowest);
        keep({ s.now - busy, s.now, resource::device });
    }

    // The CPU's cores read so many bytes of weights in operations of one graph.
    void compute_on_cpu(ns_t & host, uint64_t n_nodes, uint64_t bytes) {
        const ns_t   begin     = host + us(p_.region_us + double(n_nodes) * p_.cpu_node_us);
        const double busy      = double(std::max<ns_t>(0, free_of(resource::to_device) - begin));
        const double shared    = std::min(busy * p_.cpu_busy_gbs, double(bytes));
        const ns_t   end       = begin + ns_t(shared / p_.cpu_busy_gbs + (double(bytes) - shared) / p_.cpu_gbs);
        free_of(resource::cpu) = end;
        keep({ host, end, resource::cpu });
        host = end;
    }

    // The host waits for bytes of the disk, at the price `gbs`; 0: they take no time.
    void read(ns_t & host, uint64_t bytes, double gbs) {
        const ns_t begin = std::max(host, free_of(resource::disk));
        if (gbs > 0 && bytes > 0) {
            host = free_of(resource::disk) = begin + ns_t(double(bytes) / gbs);
            keep({ begin, host, resource::disk });
        }
    }

    void synchronize(ns_t & host, const stream & s) {
        sums_.waits++;
        wait(host, s.now, s.now > host ? p_.sync_us : p_.idle_sync_us);
    }

    // An event is the time at which it was recorded.
    ns_t record(ns_t & host, const stream & s) {
        host += us(p_.event_us);
        return s.now;
    }

    void let_wait(ns_t & host, stream & s, ns_t event) {
        host  += us(p_.event_us);
        s.now  = std::max(s.now, event);
    }

    const costs & sums() const { return sums_; }

    // Time within [begin, end] in which one of the resources works.
    ns_t busy(ns_t begin, ns_t end, std::initializer_list<resource> any) const {
        std::vector<std::pair<ns_t, ns_t>> all;
        for (const interval & i : intervals_) {
            if (std::find(any.begin(), any.end(), i.on) != any.end()) {
                all.emplace_back(std::max(i.begin, begin), std::min(i.end, end));
            }
        }
        std::sort(all.begin(), all.end());
        ns_t sum = 0;
        for (const auto & [from, to] : all) {
            sum   += std::max<ns_t>(0, to - std::max(from, begin));
            begin  = std::max(begin, to);
        }
        return sum;
    }

    static ns_t us(double microseconds) { return ns_t(microseconds * 1e3); }

  private:
    ns_t & free_of(resource r) { return free_[p_.one_queue != 0 && r < resource::cpu ? 0 : size_t(r)]; }

    void keep(const interval & i) {
        if (i.end > i.begin) {
            intervals_.push_back(i);
        }
    }

    void wait(ns_t & host, ns_t until, double then_us) { host = std::max(host, until) + us(then_us); }

    void begin_copy(ns_t & host, stream & s, resource link, uint64_t bytes, bool is_pinned) {
        ns_t &       free   = free_of(link);
        const ns_t   begin  = std::max({ s.now, free, host });
        const bool   beside = link == resource::to_device && free_of(resource::cpu) > begin;
        const double gbs    = !is_pinned ? p_.pageable_gbs : beside ? p_.link_busy_gbs : p_.link_gbs;
        const ns_t   took   = ns_t(double(bytes) / gbs);
        free                = begin + us(p_.gap_us) + took;
        s.now               = begin + us(p_.copy_us) + took;
        sums_.copies++;
        sums_.reads        += link == resource::to_host;
        sums_.copied_bytes += bytes;
        keep({ begin, free, link });
    }

    const prices          p_;
    std::array<ns_t, 5>   free_ = {}; // [resource]
    costs                 sums_;
    std::vector<interval> intervals_;
};

} // namespace modelled
