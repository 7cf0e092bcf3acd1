// SPDX-License-Identifier: MIT
#include "model/use-counts.h"

#include "fixtures/check-contains.h"
#include "fixtures/gguf-builder.h"
#include "fixtures/temp-dir.h"

#include <cerrno>
#include <csignal>
#include <doctest/doctest.h>
#include <filesystem>
#include <numeric>
#include <string>
#include <sys/resource.h>
#include <thread>
#include <vector>

using namespace hobbit;

static constexpr uint64_t MODEL_BYTES = 1000;

// 2 layers of 4 experts, of which a token uses 2.
static use_counts counts_of(const std::vector<int32_t> & first, const std::vector<int32_t> & second) {
    use_counts counts({ 2, 2 }, 4);
    counts.add(0, first);
    counts.add(1, second);
    return counts;
}

// A file with these keys; without counts if there are none.
static void write(const std::string & path, uint64_t model_bytes, const std::vector<int32_t> & uses) {
    gguf_builder file;
    gguf_set_val_u64(file.keys(), "hobbit.model_bytes", model_bytes);
    if (!uses.empty()) {
        file.set_ints("hobbit.expert_uses", uses);
    }
    file.write(path);
}

static size_t n_files(const temp_dir & dir) {
    using entry = std::filesystem::directory_iterator;
    return size_t(std::distance(entry(dir.path("")), entry()));
}

TEST_CASE("rates are uses per token, in each layer by itself") {
    CHECK(use_counts({ 2, 2 }, 4).rates().empty());
    const expert_table<float> rates = counts_of({ 0, 1, 0, 2 }, { 3, 1 }).rates(); // two tokens and one
    CHECK(rates[{ 0, 0 }] == 1.0f);
    CHECK(rates[{ 0, 1 }] == 0.5f);
    CHECK(rates[{ 0, 3 }] == 0.0f);
    CHECK(rates[{ 1, 3 }] == 1.0f);
    CHECK(counts_of({ 0, 1 }, {}).rates()[{ 1, 0 }] == 0.0f);
}

TEST_CASE("rates are of each layer's own number of experts") {
    use_counts counts({ 2, 1 }, 4);
    counts.add(0, { 0, 1, 0, 2 }); // two tokens
    counts.add(1, { 3, 1 });       // two tokens
    const expert_table<float> rates = counts.rates();
    CHECK(rates[{ 0, 0 }] == 1.0f);
    CHECK(rates[{ 0, 1 }] == 0.5f);
    CHECK(rates[{ 1, 3 }] == 0.5f);
}

TEST_CASE("the most used experts come first, those never used not at all") {
    CHECK(most_used({}).empty());
    const std::vector<expert_id> expected = { { 0, 0 }, { 1, 1 }, { 1, 3 }, { 0, 1 }, { 0, 2 } };
    CHECK(most_used(counts_of({ 0, 1, 0, 2 }, { 3, 1 }).rates()) == expected);
}

TEST_CASE("old counts fade, and stay within bounds") {
    use_counts counts({ 1 }, 2);
    counts.add(0, std::vector<int32_t>(size_t(use_counts::most_tokens), 0));
    CHECK(counts.counts() == std::vector<int32_t>{ int32_t(use_counts::most_tokens), 0 });
    counts.add(0, { 1 });
    CHECK(counts.counts()[0] == use_counts::most_tokens / 2);
    for (int i = 0; i < 4; i++) {
        counts.add(0, std::vector<int32_t>(size_t(use_counts::most_tokens), 1));
    }
    CHECK(counts.rates()[{ 0, 1 }] > 0.9f);
    counts.add(std::vector<int32_t>{ INT32_MAX, INT32_MAX });
    CHECK(std::accumulate(counts.counts().begin(), counts.counts().end(), int64_t(0)) <= use_counts::most_tokens);
}

TEST_CASE("what is written is read again, and added") {
    const temp_dir    dir;
    const std::string path    = dir.path("m.hobbit-uses");
    const use_counts  written = counts_of({ 0, 1, 0, 2 }, { 3, 1 });
    use_counts        counts({ 2, 2 }, 4);
    CHECK(counts.read(path, MODEL_BYTES).ok()); // there is none
    CHECK(counts.rates().empty());
    REQUIRE(written.write(path, MODEL_BYTES).ok());
    REQUIRE(counts.read(path, MODEL_BYTES).ok());
    CHECK(counts.counts() == written.counts());
    REQUIRE(counts.read(path, MODEL_BYTES).ok());
    CHECK(counts.counts() == std::vector<int32_t>{ 4, 2, 2, 0, 0, 2, 0, 2 });
    CHECK(n_files(dir) == 1);
}

TEST_CASE("a file that does not count this model's experts is refused and adds nothing") {
    const temp_dir    dir;
    const std::string path = dir.path("m.hobbit-uses");
    use_counts        counts({ 2, 2 }, 4);
    const auto        refused = [&] {
        const status s = counts.read(path, MODEL_BYTES);
        CHECK_FALSE(s.ok());
        CHECK_CONTAINS(s.message(), path);
        CHECK(counts.rates().empty());
    };
    for (const char * bytes : { "", "GGUF", "GGUF\3\0\0\0", "something else" }) {
        dir.write("m.hobbit-uses", bytes);
        refused();
    }
    write(path, MODEL_BYTES + 1, std::vector<int32_t>(8, 1)); // uses of another model
    refused();
    write(path, MODEL_BYTES, std::vector<int32_t>(7, 1));
    refused();
    write(path, MODEL_BYTES, { 1, 1, 1, 1, 1, 1, 1, -1 });
    refused();
    write(path, MODEL_BYTES, {});
    refused();
}

TEST_CASE("a folder that cannot be written is an error that leaves nothing behind") {
    const temp_dir dir;
    std::filesystem::create_directories(dir.path("m.hobbit-uses/folder")); // in the file's place
    CHECK_CONTAINS(counts_of({ 0, 1 }, {}).write(dir.path("m.hobbit-uses"), MODEL_BYTES).message(),
                   "m.hobbit-uses' cannot be written: ");
    CHECK_CONTAINS(counts_of({ 0, 1 }, {}).write(dir.path("nowhere/m"), MODEL_BYTES).message(), "No such file");
    CHECK(n_files(dir) == 1);
}

static rlimit g_file_size;

TEST_CASE("a write that fails is an error though nothing else says so") {
    const temp_dir   dir;
    const use_counts counts(std::vector<uint32_t>(100, 2), 100); // more than stdio buffers
    signal(SIGXFSZ, SIG_IGN);
    REQUIRE(getrlimit(RLIMIT_FSIZE, &g_file_size) == 0);
    const rlimit small = { 4096, g_file_size.rlim_max };
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    // when gguf logs its failure, the disk has room again: closing the file succeeds
    ggml_log_set(
        [](ggml_log_level, const char *, void *) {
            setrlimit(RLIMIT_FSIZE, &g_file_size);
            errno = 0;
        },
        nullptr);
    const status s = counts.write(dir.path("m.hobbit-uses"), MODEL_BYTES);
    ggml_log_set(nullptr, nullptr);
    setrlimit(RLIMIT_FSIZE, &g_file_size);
    CHECK_CONTAINS(s.message(), "m.hobbit-uses' cannot be written: Input/output error");
    CHECK(n_files(dir) == 0);
}

TEST_CASE("writers that meet leave one of their files, whole") {
    const temp_dir           dir;
    const std::string        path = dir.path("m.hobbit-uses");
    std::vector<std::thread> writers;
    for (int32_t expert = 0; expert < 4; expert++) {
        writers.emplace_back([&, expert] {
            for (int i = 0; i < 20; i++) {
                CHECK(counts_of({ expert, expert }, {}).write(path, MODEL_BYTES).ok());
                use_counts counts({ 2, 2 }, 4);
                CHECK(counts.read(path, MODEL_BYTES).ok());
                CHECK(std::accumulate(counts.counts().begin(), counts.counts().end(), 0) == 2);
            }
        });
    }
    for (std::thread & writer : writers) {
        writer.join();
    }
    CHECK(n_files(dir) == 1);
}
