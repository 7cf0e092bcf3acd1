// SPDX-License-Identifier: MIT
#include "base/memory-turn.h"

#include "base/system-memory.h"
#include "base/thread-annotations.h"
#include "ggml-impl.h"
#include "hobbit.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/file.h>
#include <thread>
#include <unistd.h>

namespace hobbit {

static constexpr auto PERIOD = std::chrono::milliseconds(20); // between two tries

static mutex                                  turn_mutex;
static std::weak_ptr<memory_turn> latest_turn GUARDED_BY(turn_mutex);

std::shared_ptr<memory_turn> memory_turn::current() {
    mutex_lock lock(turn_mutex);
    return latest_turn.lock();
}

std::shared_ptr<memory_turn> memory_turn::take(std::chrono::milliseconds patience, bool or_beside) {
    const int  file = open(meminfo_path().c_str(), O_RDONLY | O_CLOEXEC);
    const auto end  = std::chrono::steady_clock::now() + patience;
    bool       told = patience.count() == 0;
    while (true) {
        const bool is_over = std::chrono::steady_clock::now() >= end;
        {
            mutex_lock                   lock(turn_mutex);
            std::shared_ptr<memory_turn> turn = latest_turn.lock();
            if (turn) {
                close(file);
                return turn;
            }
            const bool is_free = flock(file, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
            if (is_free || (is_over && or_beside)) {
                turn.reset(new memory_turn(file));
                latest_turn = turn;
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

struct hobbit_memory_turn {
    std::shared_ptr<hobbit::memory_turn> turn;
};

hobbit_memory_turn * hobbit_take_turn(bool or_beside) {
    try {
        auto turn = hobbit::memory_turn::take(std::chrono::milliseconds(0), or_beside);
        return turn ? new hobbit_memory_turn{ std::move(turn) } : nullptr;
    } catch (const std::exception &) { // no memory for it
        return nullptr;
    }
}

void hobbit_end_turn(hobbit_memory_turn * turn) {
    delete turn;
}
