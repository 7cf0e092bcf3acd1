// SPDX-License-Identifier: MIT
//
// A library to preload: one allocation of C++ throws std::bad_alloc, or several one after the other. malloc() does not
// fail. Where MEMORY_FAIL names a file, SIGUSR1 reads "FIRST COUNT" from it, for memory_fail(), and only allocations of
// the main thread count, in which a server computes.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <new>

static std::atomic<long> g_calls(0); // since memory_fail()
static std::atomic<long> g_first(-1);
static std::atomic<long> g_count(0);

extern "C" {
// Fails `count` allocations from the one with this number on, counted from 0; -1: none.
void memory_fail(long first, long count) {
    g_first = -1;
    g_calls = 0;
    g_count = count;
    g_first = first;
}

long memory_calls() {
    return g_calls;
}
}

static void read_file(int) {
    char      text[64] = {};
    const int fd       = open(getenv("MEMORY_FAIL"), O_RDONLY);
    if (fd >= 0 && read(fd, text, sizeof(text) - 1) > 0) {
        char *     end   = text;
        const long first = strtol(text, &end, 10);
        memory_fail(first, strtol(end, nullptr, 10));
    }
    close(fd);
}

__attribute__((constructor)) static void begin() {
    if (getenv("MEMORY_FAIL")) {
        signal(SIGUSR1, read_file);
    }
}

static void * allocate(size_t size, size_t alignment) {
    static const bool all   = getenv("MEMORY_FAIL") == nullptr;
    const long        first = g_first;
    if (first >= 0 && (all || gettid() == getpid())) {
        const long n = g_calls++;
        if (n >= first && n < first + g_count) {
            throw std::bad_alloc();
        }
    }
    void * p = aligned_alloc(alignment, (size + alignment) / alignment * alignment);
    if (!p) {
        throw std::bad_alloc();
    }
    return p;
}

void * operator new(size_t size) {
    return allocate(size, alignof(std::max_align_t));
}

void * operator new[](size_t size) {
    return allocate(size, alignof(std::max_align_t));
}

void * operator new(size_t size, std::align_val_t alignment) {
    return allocate(size, size_t(alignment));
}

void * operator new[](size_t size, std::align_val_t alignment) {
    return allocate(size, size_t(alignment));
}

void operator delete(void * p) noexcept {
    free(p);
}

void operator delete[](void * p) noexcept {
    free(p);
}

void operator delete(void * p, size_t) noexcept {
    free(p);
}

void operator delete[](void * p, size_t) noexcept {
    free(p);
}

void operator delete(void * p, std::align_val_t) noexcept {
    free(p);
}

void operator delete[](void * p, std::align_val_t) noexcept {
    free(p);
}

void operator delete(void * p, size_t, std::align_val_t) noexcept {
    free(p);
}

void operator delete[](void * p, size_t, std::align_val_t) noexcept {
    free(p);
}
