// SPDX-License-Identifier: MIT
#pragma once

#include "file-reader.h"

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

// A reader whose reads last until the test lets them end. Fills what it reads with the low byte of the block number.
class fake_reader final : public hobbit::file_reader {
  public:
    // Reads from now on end at once.
    void open_gate() {
        std::lock_guard<std::mutex> lock(mutex_);
        gate_open_ = true;
        changed_.notify_all();
    }

    void fail_at(uint64_t offset, const std::string & message) {
        std::lock_guard<std::mutex> lock(mutex_);
        errors_[offset] = message;
    }

    // Lets `n` more reads end.
    void let(size_t n) {
        std::lock_guard<std::mutex> lock(mutex_);
        permits_ += n;
        changed_.notify_all();
    }

    // Lets a read end whenever one has used up the leave before, until close().
    void let_one_by_one_until_closed() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!closed_) {
            permits_ = 1;
            changed_.notify_all();
            changed_.wait(lock, [&] { return closed_ || permits_ == 0; });
        }
    }

    void close() {
        std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
        changed_.notify_all();
    }

    // Waits until `n` reads have begun, and returns their offsets in the order of beginning.
    std::vector<uint64_t> wait_begun(size_t n) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return begun_.size() >= n; });
        return begun_;
    }

    std::vector<uint64_t> begun() { return wait_begun(0); }

    static char byte_at(uint64_t offset) { return char(offset / alignment); }

    hobbit::status read_at(uint32_t, uint64_t offset, size_t size, size_t, void * buf) override {
        std::unique_lock<std::mutex> lock(mutex_);
        begun_.push_back(offset);
        changed_.notify_all();
        changed_.wait(lock, [&] { return gate_open_ || permits_ > 0; });
        permits_ -= gate_open_ ? 0 : 1;
        changed_.notify_all();
        const auto error = errors_.find(offset);
        if (error != errors_.end()) {
            return hobbit::status::error(error->second);
        }
        lock.unlock();
        for (size_t i = 0; i < size; i += alignment) {
            memset(static_cast<char *>(buf) + i, byte_at(offset + i), alignment);
        }
        return {};
    }

  private:
    std::mutex                      mutex_;
    std::condition_variable         changed_;
    bool                            gate_open_ = false;
    bool                            closed_    = false;
    size_t                          permits_   = 0;
    std::vector<uint64_t>           begun_;
    std::map<uint64_t, std::string> errors_; // [offset]
};
