// SPDX-License-Identifier: MIT
#include "base/status.h"
#include "hobbit.h"
#include "io/file-reader.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>
#include <random>
#include <utility>
#include <vector>

using namespace hobbit;

static status measure_disk(const std::string & path, uint64_t read_bytes, uint32_t n_threads, double seconds,
                           hobbit_disk_speed & speed) {
    posix_file_reader reader;
    HOBBIT_TRY(reader.open(path));
    constexpr uint64_t A     = file_reader::alignment;
    const uint64_t     whole = std::filesystem::file_size(path) / A * A;
    const uint64_t     size  = std::min((read_bytes + A - 1) / A * A, whole);
    if (size == 0) {
        return status::error("'%s' is too small to measure the disk with", path.c_str());
    }

    using clock      = std::chrono::steady_clock;
    const auto start = clock::now();
    const auto end   = start + std::chrono::duration<double>(seconds);
    const auto run   = [&](uint32_t thread) -> std::pair<status, uint64_t> {
        staging_buffer  memory;
        std::mt19937_64 draw(thread);
        if (!memory.reserve(size)) {
            return { status::error("no memory left to read into"), 0 };
        }
        status   s;
        uint64_t n_bytes = 0;
        do { // at least once: on a busy machine a thread may start after the end
            s        = reader.read_at(0, draw() % (whole / size) * size, size, size, memory.data());
            n_bytes += size;
        } while (s.ok() && clock::now() < end);
        return { s, n_bytes };
    };
    std::vector<std::future<std::pair<status, uint64_t>>> threads; // joined also where an exception ends this function
    for (uint32_t i = 0; i < n_threads; ++i) {
        threads.push_back(std::async(std::launch::async, run, i));
    }
    uint64_t sum = 0;
    for (auto & thread : threads) {
        const auto [s, n_bytes] = thread.get();
        HOBBIT_TRY(s);
        sum += n_bytes;
    }
    const std::chrono::duration<double> elapsed = clock::now() - start;
    speed                                       = { double(sum) / elapsed.count(), size, reader.direct_io() };
    return {};
}

bool hobbit_measure_disk(const char * path, uint64_t read_bytes, uint32_t n_threads, double seconds,
                         struct hobbit_disk_speed * speed, char * err, size_t err_size) {
    *speed = {};
    return report_call("cannot measure the disk", err, err_size,
                       [&] { return measure_disk(path, read_bytes, n_threads, seconds, *speed); });
}
