// SPDX-License-Identifier: MIT
#include "io/disk-speed.h"

#include "io/file-reader.h"
#include "io/staging-buffer.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <random>
#include <thread>
#include <vector>

namespace hobbit {

using clock = std::chrono::steady_clock;

status measure_disk(const std::string & path, uint64_t read_bytes, uint32_t n_threads, double seconds,
                    hobbit_disk_speed & speed) {
    posix_file_reader reader;
    HOBBIT_TRY(reader.open(path));
    constexpr uint64_t A     = file_reader::alignment;
    const uint64_t     whole = std::filesystem::file_size(path) / A * A;
    const uint64_t     size  = std::min((read_bytes + A - 1) / A * A, whole);
    if (size == 0) {
        return status::error("'%s' is too small to measure the disk with", path.c_str());
    }

    const auto            start = clock::now();
    const auto            end   = start + std::chrono::duration<double>(seconds);
    std::vector<uint64_t> n_bytes(n_threads, 0);
    std::vector<status>   results(n_threads);
    const auto            run = [&](uint32_t thread) {
        staging_buffer  memory;
        std::mt19937_64 draw(thread);
        if (!memory.reserve(size)) {
            results[thread] = status::error("no memory left to read into");
        }
        while (results[thread].ok() && clock::now() < end) {
            const uint64_t place  = draw() % (whole / size);
            results[thread]       = reader.read_at(0, place * size, size, size, memory.data());
            n_bytes[thread]      += size;
        }
    };
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < n_threads; ++i) {
        threads.emplace_back(run, i);
    }
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n_threads; ++i) {
        threads[i].join();
        sum += n_bytes[i];
    }
    const std::chrono::duration<double> elapsed = clock::now() - start;
    speed                                       = { double(sum) / elapsed.count(), size, reader.direct_io() };
    const auto failed = std::find_if(results.begin(), results.end(), [](const status & s) { return !s.ok(); });
    return failed == results.end() ? status() : *failed;
}

} // namespace hobbit
