// SPDX-License-Identifier: MIT
#include "offload/latency-means.h"

#include <doctest/doctest.h>

using namespace hobbit;

TEST_CASE("a mean goes back 16 samples") {
    latency_means means(2);
    CHECK(means.seconds({ 0, 1 }) == 0.0);
    means.took({ { 0, 1 } }, 1.0);
    CHECK(means.seconds({ 0, 1 }) == 1.0);
    means.took({ { 0, 1 } }, 3.0);
    CHECK(means.seconds({ 0, 1 }) == 2.0);
    for (int i = 0; i < 100; i++) {
        means.took({ { 0, 1 } }, 2.0);
    }
    means.took({ { 0, 1 } }, 18.0);
    CHECK(means.seconds({ 0, 1 }) == doctest::Approx(3.0));
    CHECK(means.seconds({ 1, 1 }) == 0.0);
}

TEST_CASE("numbers of rows have means of their own, by powers of two") {
    latency_means means(1);
    means.took({ { 0, 2 } }, 1.0);
    CHECK(means.seconds({ 0, 3 }) == 1.0);
    CHECK(means.seconds({ 0, 1 }) == 1.0); // of the next larger
    CHECK(means.seconds({ 0, 4 }) == 2.0); // in proportion to the next smaller
    CHECK(means.seconds({ 0, 31 }) == 8.0);
    means.took({ { 0, 16 } }, 3.0);
    CHECK(means.seconds({ 0, 31 }) == 3.0);
    CHECK(means.seconds({ 0, 15 }) == 4.0);
    CHECK(means.seconds({ 0, UINT32_MAX }) > 3.0);
}

TEST_CASE("a sample of several experts is shared by what was expected") {
    latency_means means(3);
    means.took({ { 0, 1 } }, 1.0);
    means.took({ { 1, 1 } }, 3.0);
    means.took({ { 0, 1 }, { 0, 1 }, { 1, 1 } }, 10.0); // twice as long as expected
    CHECK(means.seconds({ 0, 1 }) == doctest::Approx(1.5));
    CHECK(means.seconds({ 1, 1 }) == doctest::Approx(4.5));
    means.took({ { 0, 1 }, { 1, 1 }, { 2, 1 } }, 9.0); // the third counts as the mean of the others
    CHECK(means.seconds({ 2, 1 }) == doctest::Approx(3.0));
    means.took({ { 2, 1 }, { 2, 1 } }, 6.0);
    CHECK(means.seconds({ 2, 1 }) == doctest::Approx(3.0));
}

TEST_CASE("a mean that grew old is replaced") {
    latency_means means(1);
    means.took({ { 0, 1 } }, 100.0);
    for (uint32_t i = 1; i < latency_means::max_age; i++) {
        CHECK_FALSE(means.pass_over({ 0, 1 }));
    }
    CHECK(means.pass_over({ 0, 1 }));
    means.took({ { 0, 1 } }, 1.0);
    CHECK(means.seconds({ 0, 1 }) == 1.0);
    CHECK_FALSE(means.pass_over({ 0, 1 }));
}
