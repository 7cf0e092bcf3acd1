// SPDX-License-Identifier: MIT
#include "base/timeline.h"

#include "fixtures/temp-dir.h"

#include <chrono>
#include <doctest/doctest.h>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

using namespace hobbit;

static std::string read(const std::string & path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

static size_t count(const std::string & text, const std::string & word) {
    size_t n = 0;
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
        n++;
    }
    return n;
}

TEST_CASE("spans of several threads are events with their thread, their time and their notes") {
    temp_dir          dir;
    const std::string path = dir.path("t.json");
    timeline          events;
    REQUIRE(events.open(path).ok());
    const auto start = std::chrono::steady_clock::now();
    {
        timeline_span outer(events, "outer");
        outer.note("bytes", 17);
        const timeline_span inner(events, "inner");
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    std::thread([&] {
        timeline::name_thread("reads");
        const timeline_span span(events, "read");
    }).join();
    REQUIRE(events.close().ok());

    const std::string text = read(path);
    CHECK(text.find("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n") == 0);
    CHECK(text.substr(text.size() - 3) == "]}\n");
    CHECK(count(text, "\"ph\":\"X\"") == 3);
    CHECK(count(text, "\"args\":{\"bytes\":17}") == 1);
    CHECK(count(text, "\"thread_name\"") == 2);
    CHECK(count(text, "\"args\":{\"name\":\"computes\"}") == 1);
    CHECK(count(text, "\"args\":{\"name\":\"reads\"}") == 1);
    CHECK(text.find("\"inner\"") < text.find("\"outer\""));
    const double duration = std::stod(text.substr(text.find("\"dur\":") + 6));
    CHECK(duration >= 2000);
    CHECK(duration <= took.count());
}

TEST_CASE("nothing is written while a timeline is closed, and no span that ends later") {
    temp_dir            dir;
    const std::string   path = dir.path("t.json");
    timeline            events;
    const timeline_span early(events, "early");
    {
        REQUIRE(events.open(path).ok());
        const timeline_span late(events, "late");
        REQUIRE(events.close().ok());
    }
    const std::string text = read(path);
    CHECK(count(text, "\"ph\":\"X\"") == 0);
    CHECK(events.close().ok());
    CHECK(read(path) == text);
    CHECK(events.open(path).ok()); // replaces a timeline
}

TEST_CASE("other files stay, and a timeline that is incomplete is an error") {
    temp_dir          dir;
    const std::string path = dir.path("notes.txt");
    std::ofstream(path) << "notes";
    timeline events;
    CHECK(events.open(path).message() ==
          "'" + path + "' exists and is not a timeline: choose another file for the timeline, or remove it");
    CHECK_FALSE(events.is_open());
    CHECK(read(path) == "notes");

    REQUIRE(events.open("/dev/full").ok());
    {
        const timeline_span span(events, "lost");
    }
    CHECK(events.close().message().find("the timeline '/dev/full' cannot be written") == 0);
}
