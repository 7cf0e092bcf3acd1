// SPDX-License-Identifier: MIT
#include "offload/latency-estimate.h"

#include <doctest/doctest.h>
#include <random>

using namespace hobbit;

TEST_CASE("a line is so much for each job and so much for each unit") {
    const latency_estimate line(2.0, 0.5);
    CHECK(line.seconds({ 1, 1 }) == 2.5);
    CHECK(line.seconds({ 3, 8 }) == 10.0);
}

TEST_CASE("a line ten times off is what was measured after 50 samples") {
    std::mt19937 random(1);
    for (const double scale : { 1e-9, 1.0, 1e6 }) {
        for (const double off : { 0.1, 1.0, 10.0 }) {
            for (const double off_too : { 0.1, 1.0, 10.0 }) {
                CAPTURE(scale);
                CAPTURE(off);
                CAPTURE(off_too);
                const latency_estimate truth(3.0 * scale, 0.5 * scale);
                latency_estimate       line(truth.per_job() * off, truth.per_unit() * off_too);
                for (int i = 0; i < 50; i++) {
                    const double                 jobs = double(1 + random() % 4);
                    const latency_estimate::work done = { jobs, jobs * double(1 + random() % 16) };
                    latency_estimate::correct({ { &line, done } }, truth.seconds(done));
                }
                for (const double units : { 1.0, 4.0, 16.0 }) {
                    CHECK(line.seconds({ 1, units }) == doctest::Approx(truth.seconds({ 1, units })).epsilon(0.1));
                }
            }
        }
    }
}

TEST_CASE("where one number of units is all there is, the line keeps its shape") {
    latency_estimate line(10.0, 1.0);
    for (int i = 0; i < 50; i++) {
        latency_estimate::correct({ { &line, { 1, 1 } } }, 1.1);
    }
    CHECK(line.seconds({ 1, 1 }) == doctest::Approx(1.1).epsilon(0.02));
    CHECK(line.per_job() > line.per_unit());
    CHECK(line.seconds({ 1, 100 }) > line.seconds({ 1, 1 }));
}

TEST_CASE("kinds that are measured together only as a sum are told apart where their numbers differ") {
    std::mt19937     random(2);
    latency_estimate a(10.0, 0.0);
    latency_estimate b(0.1, 0.0);
    for (int i = 0; i < 200; i++) {
        const double n = double(1 + random() % 6);
        const double m = double(1 + random() % 6);
        latency_estimate::correct({ { &a, { n, 0 } }, { &b, { m, 0 } } }, n * 1.0 + m * 3.0);
    }
    CHECK(a.seconds({ 1, 0 }) == doctest::Approx(1.0).epsilon(0.2));
    CHECK(b.seconds({ 1, 0 }) == doctest::Approx(3.0).epsilon(0.2));
}

TEST_CASE("noise is averaged, a single outlier changes little and not for long") {
    std::mt19937     random(3);
    latency_estimate line(1.0, 0.0);
    for (int i = 0; i < 100; i++) {
        latency_estimate::correct({ { &line, { 1, 0 } } }, 0.8 + 0.4 * double(random() % 1000) / 1000.0);
        CHECK(line.seconds({ 1, 0 }) == doctest::Approx(1.0).epsilon(0.2));
    }
    latency_estimate::correct({ { &line, { 1, 0 } } }, 1000.0);
    CHECK(line.seconds({ 1, 0 }) < 2.5);
    for (int i = 0; i < 20; i++) {
        latency_estimate::correct({ { &line, { 1, 0 } } }, 1.0);
    }
    CHECK(line.seconds({ 1, 0 }) == doctest::Approx(1.0).epsilon(0.05));
}

TEST_CASE("a machine that becomes slower is followed") {
    latency_estimate line(1.0, 1.0);
    for (int i = 0; i < 500; i++) {
        latency_estimate::correct({ { &line, { 1, 1 } } }, 2.0);
    }
    for (int i = 0; i < 50; i++) {
        latency_estimate::correct({ { &line, { 1, 1 } } }, 8.0);
    }
    CHECK(line.seconds({ 1, 1 }) == doctest::Approx(8.0).epsilon(0.05));
}

TEST_CASE("no number becomes negative, none is lost for ever") {
    latency_estimate line(1.0, 0.0);
    for (int i = 0; i < 100; i++) {
        latency_estimate::correct({ { &line, { 1, double(1 + i % 7) } } }, 0.5 * (1 + i % 7)); // nothing but units
        CHECK(line.per_job() >= 0.0);
    }
    CHECK(line.seconds({ 1, 7 }) == doctest::Approx(3.5).epsilon(0.1));
    CHECK(line.seconds({ 1, 1 }) == doctest::Approx(0.5).epsilon(0.2));
}
