// SPDX-License-Identifier: MIT
#include "predict/prefetch-governor.h"

#include <doctest/doctest.h>

using namespace hobbit;

using pass = prefetch_governor::pass;

// Ends up to `n` passes, until one brings a pause or ends it; returns their number.
static size_t run(prefetch_governor & g, const pass & p, size_t n) {
    const bool active = g.active();
    for (size_t i = 1; i <= n; i++) {
        g.end_pass(p);
        if (g.active() != active) {
            return i;
        }
    }
    return n;
}

TEST_CASE("prefetch pays while precision and idle share sum to more than 1") {
    struct example {
        pass p;
        bool pays;
    };
    const example examples[] = {
        { { 10, 6, 5.0, 10.0 }, true },    // 0.6 + 0.5
        { { 10, 5, 5.0, 10.0 }, false },   // 0.5 + 0.5
        { { 10, 10, 9.9, 10.0 }, true },   // always right
        { { 10, 9, 10.0, 10.0 }, false },  // the disk is never idle
        { { 10, 1, 0.5, 10.0 }, true },    // the disk has nothing to do
        { { 10, 0, 0.0, 10.0 }, false },   // always wrong
        { { 10, 7, 600.0, 2000.0 }, true } // 0.7 + 0.7
    };
    for (const example & e : examples) {
        CAPTURE(e.p.used);
        CAPTURE(e.p.demand);
        prefetch_governor g;
        CHECK(g.active());
        run(g, e.p, 1000);
        CHECK(g.active() == e.pays);
        CHECK(g.n_pauses() == (e.pays ? 0 : 1));
    }
}

TEST_CASE("a verdict takes passes and experts, trials follow pauses that grow") {
    const pass        bad = { 10, 5, 8.0, 10.0 };
    prefetch_governor g;
    CHECK(run(g, bad, 100) == prefetch_governor::min_passes);
    for (const size_t pause : { 256, 512, 1024, 2048, 4096, 4096 }) {
        CHECK_FALSE(g.active());
        CHECK(run(g, {}, 10000) == pause);
        CHECK(g.active());
        CHECK(run(g, bad, 100) == prefetch_governor::min_passes); // what was before the pause is forgotten
    }
    CHECK(g.n_pauses() == 7);

    prefetch_governor few; // 31 experts in any 64 passes
    for (int i = 0; i < 1000; i++) {
        few.end_pass({ i % 64 < 31 ? 1u : 0u, 0, 8.0, 10.0 });
    }
    CHECK(few.active());
}

TEST_CASE("a trial that does not fail makes the next pause short again") {
    const pass        bad = { 10, 5, 8.0, 10.0 };
    prefetch_governor g;
    run(g, bad, 100);
    run(g, {}, 1000);
    CHECK(run(g, { 10, 10, 5.0, 10.0 }, 100) == 100);
    run(g, bad, 100);
    CHECK(run(g, {}, 1000) == prefetch_governor::min_pause);
}

TEST_CASE("the verdict is about the last passes alone") {
    prefetch_governor g;
    run(g, { 10, 10, 5.0, 10.0 }, 1000);
    CHECK(run(g, { 10, 0, 5.0, 10.0 }, 1000) == 32); // of 64: precision 0.5, idle 0.5
}
