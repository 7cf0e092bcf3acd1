// SPDX-License-Identifier: MIT
#include "offload/placement.h"

#include <doctest/doctest.h>

using namespace hobbit;

// Reports the time of experts that one place computes.
static void took(latency_means & means, const std::vector<expert_work> & work, double seconds) {
    means.took(work, cpu_experts(work.size(), true), true, seconds);
}

static expert_work job(uint64_t bytes, uint32_t n_rows = 1) {
    return { bytes, n_rows, false };
}

TEST_CASE("a mean goes back 64 samples") {
    latency_means means;
    CHECK(means.seconds(job(0)) == 0.0);
    took(means, { job(0) }, 1.0);
    CHECK(means.seconds(job(0)) == 1.0);
    took(means, { job(0) }, 3.0);
    CHECK(means.seconds(job(0)) == 2.0);
    for (int i = 0; i < 1000; i++) {
        took(means, { job(0) }, 2.0);
    }
    took(means, { job(0) }, 66.0);
    CHECK(means.seconds(job(0)) == doctest::Approx(3.0));
    CHECK(means.seconds(job(1)) == 0.0);
}

TEST_CASE("a constant mean holds for all larger numbers of rows") {
    latency_means means(true);
    took(means, { job(0, 2) }, 1.0);
    CHECK(means.seconds(job(0, 512)) == 1.0);
    CHECK(means.seconds(job(0, 1)) == 0.0);
}

TEST_CASE("numbers of rows have means of their own, by powers of two") {
    latency_means means;
    took(means, { job(0, 2) }, 1.0);
    CHECK(means.seconds(job(0, 3)) == 1.0);
    CHECK(means.seconds(job(0, 1)) == 0.0); // no smaller one is known
    CHECK(means.seconds(job(0, 4)) == 2.0); // in proportion to the next smaller
    CHECK(means.seconds(job(0, 31)) == 8.0);
    took(means, { job(0, 16) }, 3.0);
    CHECK(means.seconds(job(0, 31)) == 3.0);
    CHECK(means.seconds(job(0, 15)) == 4.0);
    CHECK(means.seconds(job(0, 1u << 15)) == means.seconds(job(0, UINT32_MAX))); // the last one
}

TEST_CASE("a sample of several experts is shared by what was expected") {
    latency_means means;
    took(means, { job(0) }, 1.0);
    took(means, { job(1) }, 3.0);
    took(means, { job(0), job(1) }, 8.0); // twice as long as expected: 2 and 6
    CHECK(means.seconds(job(0)) == doctest::Approx(1.5));
    CHECK(means.seconds(job(1)) == doctest::Approx(4.5));
    took(means, { job(1), job(2) }, 9.0); // alike, since the latter is new
    CHECK(means.seconds(job(1)) == doctest::Approx(4.5));
    CHECK(means.seconds(job(2)) == doctest::Approx(4.5));
}

TEST_CASE("a sample is of the experts that the place computed") {
    latency_means means;
    means.took({ job(0), job(1), job(0) }, { true, false, true }, true, 4.0);
    CHECK(means.seconds(job(0)) == 2.0);
    CHECK(means.seconds(job(1)) == 0.0);
    means.took({ job(0), job(1), job(0) }, { true, false, true }, false, 4.0);
    CHECK(means.seconds(job(0)) == 2.0);
    CHECK(means.seconds(job(1)) == 4.0);
    means.took({ job(0) }, { true }, false, 9.0); // no time of any work
    CHECK(means.seconds(job(0)) == 2.0);
}

TEST_CASE("a mean that is forgotten is replaced by the next sample") {
    latency_means means;
    took(means, { job(0) }, 100.0);
    took(means, { job(0, 2) }, 7.0);
    means.forget(job(0));
    CHECK(means.seconds(job(0)) == 0.0);
    CHECK(means.seconds(job(0, 2)) == 7.0);
    took(means, { job(0) }, 1.0);
    CHECK(means.seconds(job(0)) == 1.0);
}
