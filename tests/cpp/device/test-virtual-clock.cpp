// SPDX-License-Identifier: MIT
//
// The modelled device's clock: each rule by hand.
#include "../../modelled_device/virtual-clock.h"

#include <doctest/doctest.h>

using namespace modelled;
using start = virtual_clock::start;

// 1 GB/s everywhere, so that a byte takes a nanosecond.
static prices simple() {
    prices p;
    p.copy_call_us = p.event_us = p.idle_sync_us = 1;
    p.launch_us = p.sync_us = p.copy_us = p.region_us = 10;
    p.replay_us = 5, p.capture_us = 50, p.gap_us = 2, p.cpu_node_us = 3;
    p.link_gbs = p.cpu_gbs = 1;
    p.link_busy_gbs = p.cpu_busy_gbs = p.pageable_gbs = 0.5;
    return p;
}

TEST_CASE("a copy costs the host its call, and its stream latency and bytes") {
    virtual_clock         clock(simple());
    virtual_clock::stream s;
    ns_t                  host = 0;
    clock.copy(host, s, resource::to_device, 20000, true);
    CHECK(host == 1000);
    CHECK(s.now == 1000 + 10000 + 20000);
    clock.synchronize(host, s);
    CHECK(host == 41000);
    CHECK(clock.sums().copied_bytes == 20000);
}

TEST_CASE("from ordinary memory the call returns when the copy has ended") {
    virtual_clock         clock(simple());
    virtual_clock::stream s;
    ns_t                  host = 0;
    clock.copy(host, s, resource::to_device, 20000, false);
    CHECK(host == 1000 + 10000 + 40000);
}

TEST_CASE("copies of two streams share a direction of the link, the two directions nothing") {
    virtual_clock         clock(simple());
    virtual_clock::stream a;
    virtual_clock::stream b;
    virtual_clock::stream back;
    ns_t                  host = 0;
    clock.copy(host, a, resource::to_device, 100000, true);
    clock.copy(host, b, resource::to_device, 100000, true);
    clock.copy(host, back, resource::to_host, 100000, true);
    CHECK(b.now == 1000 + 2000 + 100000 + 10000 + 100000); // behind the first one and its gap
    CHECK(back.now == 3000 + 110000);
}

TEST_CASE("without capture the device may wait for launches, and a replay starts all kernels at once") {
    virtual_clock         clock(simple());
    virtual_clock::stream s;
    ns_t                  host = 0;
    clock.compute(host, s, start::direct, 4, 8000);
    CHECK(host == 40000);
    CHECK(s.now == 42000); // the last kernel, which takes 2 us
    clock.synchronize(host, s);
    host = 100000;
    clock.compute(host, s, start::replay, 4, 8000);
    CHECK(host == 105000);
    CHECK(s.now == 113000);
    host = 200000;
    clock.compute(host, s, start::capture, 4, 8000);
    CHECK(host == 200000 + 40000 + 55000);
    CHECK(clock.sums().launches == 3);
    CHECK(clock.sums().replays == 1);
}

TEST_CASE("graphs of two streams run one after the other, behind their own streams' copies") {
    virtual_clock         clock(simple());
    virtual_clock::stream a;
    virtual_clock::stream b;
    ns_t                  host = 0;
    clock.copy(host, a, resource::to_device, 50000, true);
    clock.compute(host, a, start::replay, 1, 30000);
    clock.compute(host, b, start::replay, 1, 30000);
    CHECK(a.now == 61000 + 30000);
    CHECK(b.now == a.now + 30000);
}

TEST_CASE("the CPU and the link slow each other down while both work") {
    virtual_clock         clock(simple());
    virtual_clock::stream s;
    ns_t                  host = 0;
    clock.copy(host, s, resource::to_device, 113000, true); // busy until 116 us
    clock.compute_on_cpu(host, 5, 100000);                  // begins at 26 us: 90 us at half speed, and then the rest
    CHECK(host == 26000 + 90000 + 55000);
    ns_t other = 100000;
    clock.copy(other, s, resource::to_device, 10000, true); // behind the first copy, while the CPU computes
    CHECK(s.now == 124000 + 10000 + 20000);
}

TEST_CASE("an event orders a stream behind another one") {
    virtual_clock         clock(simple());
    virtual_clock::stream a;
    virtual_clock::stream b;
    ns_t                  host = 0;
    clock.compute(host, a, start::replay, 1, 30000);
    const ns_t event = clock.record(host, a);
    clock.compute(host, a, start::replay, 1, 30000);
    clock.let_wait(host, b, event);
    CHECK(b.now == 35000);
    CHECK(host == 5000 + 1000 + 5000 + 1000);
}

TEST_CASE("in one queue a graph waits for copies of other streams") {
    prices p    = simple();
    p.one_queue = 1;
    virtual_clock         clock(p);
    virtual_clock::stream a;
    virtual_clock::stream b;
    ns_t                  host = 0;
    clock.copy(host, a, resource::to_device, 100000, true);
    clock.compute(host, b, start::replay, 1, 30000);
    CHECK(b.now == 103000 + 30000);
}

TEST_CASE("reads come one after the other, and each reader waits for its own") {
    virtual_clock clock(simple());
    ns_t          first = 1000, second = 2000, third = 3000;
    clock.read(first, 10000, 2.0);
    clock.read(second, 10000, 2.0);
    clock.read(third, 10000, 0.0); // from a disk without a price
    CHECK(first == 6000);
    CHECK(second == 11000);
    CHECK(third == 3000);
    CHECK(clock.busy(0, 100000, { resource::disk }) == 10000);
}

TEST_CASE("code counts by its locks, and the time in which anything works once") {
    prices p  = simple();
    p.lock_us = 1.5;
    virtual_clock         clock(p);
    virtual_clock::stream s;
    ns_t                  host = 0;
    clock.lock(host);
    CHECK(host == 1500);
    clock.copy(host, s, resource::to_device, 40000, true); // from 2.5 to 44.5 us
    clock.compute_on_cpu(host, 0, 10000);                  // from 2.5 to 32.5 us
    CHECK(clock.busy(0, 100000, { resource::cpu }) == 30000);
    CHECK(clock.busy(0, 100000, { resource::cpu, resource::to_device }) == 42000);
    CHECK(clock.busy(10000, 40000, { resource::to_device }) == 30000);
    CHECK(clock.busy(10000, 40000, { resource::device }) == 0);
}
