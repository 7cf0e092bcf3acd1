// SPDX-License-Identifier: MIT
#include "base/memory-turn.h"

#include "base/system-memory.h"
#include "ggml-impl.h"

#include <cerrno>
#include <fcntl.h>
#include <mutex>
#include <sys/file.h>
#include <thread>
#include <unistd.h>

namespace hobbit {

static constexpr auto PERIOD = std::chrono::milliseconds(20); // between two tries

static std::mutex                 mutex;
static std::weak_ptr<memory_turn> latest; // guarded by mutex

std::shared_ptr<memory_turn> memory_turn::current() {
    std::lock_guard<std::mutex> lock(mutex);
    return latest.lock();
}

std::shared_ptr<memory_turn> memory_turn::take(std::chrono::milliseconds patience, bool or_beside) {
    const int  file = open(meminfo_path().c_str(), O_RDONLY | O_CLOEXEC);
    const auto end  = std::chrono::steady_clock::now() + patience;
    bool       told = patience.count() == 0;
    while (true) {
        const bool is_over = std::chrono::steady_clock::now() >= end;
        {
            std::lock_guard<std::mutex>  lock(mutex);
            std::shared_ptr<memory_turn> turn = latest.lock();
            if (turn) {
                close(file);
                return turn;
            }
            const bool is_free = flock(file, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
            if (is_free || (is_over && or_beside)) {
                turn.reset(new memory_turn(file));
                latest = turn;
                return turn;
            }
        }
        if (is_over) {
            close(file);
            return nullptr;
        }
        if (!told) {
            GGML_LOG_INFO("hobbit: waiting for another program that takes memory for a model\n");
            told = true;
        }
        std::this_thread::sleep_for(PERIOD);
    }
}

memory_turn::memory_turn(int file) : file_(file), process_(getpid()) {}

memory_turn::~memory_turn() {
    if (getpid() == process_) { // a child of fork() shares the lock
        flock(file_, LOCK_UN);
    }
    close(file_);
}

} // namespace hobbit
