// SPDX-License-Identifier: MIT
#pragma once

// Patched sources of ggml include this first, and call these functions.

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <mutex>

// Asks for huge pages where memory is large: products read weights 1.3 to 2 times as fast. Smaller memory may lie
// between what malloc gives to others.
static inline void ggml_ask_huge_pages(void * data, size_t size) {
    if (size >= 4 << 20) {
        madvise(static_cast<char *>(data) - uintptr_t(data) % getpagesize(), size, MADV_HUGEPAGE);
    }
}

// Loads the backends that lie beside the library of this function, never those of the working folder.
static inline void ggml_load_beside(void (*load)(const char * folder)) {
    Dl_info    self;
    const bool is_known = dladdr(reinterpret_cast<const void *>(load), &self) != 0;
    load(is_known ? std::filesystem::path(self.dli_fname).parent_path().c_str() : nullptr);
}

// Backends that are libraries of their own are loaded by whoever first asks for one. Loading them asks as well.
static inline void ggml_load_once(void (*load)()) {
#ifdef GGML_BACKEND_DL
    static std::recursive_mutex      mutex;
    static bool                      is_loaded = false;
    std::lock_guard<decltype(mutex)> lock(mutex);
    if (!is_loaded) {
        is_loaded = true;
        load();
    }
#else
    (void) load;
#endif
}

// A socket ends with its program, also with one that is replaced. A machine that has vanished is noticed in 25 seconds:
// of a client too, for whose end the next one waits. A server names its client.
static inline void ggml_set_up_socket(int fd) {
    const int keep_alive[][3] = { { SOL_SOCKET, SO_KEEPALIVE, 1 },
                                  { IPPROTO_TCP, TCP_KEEPIDLE, 10 },
                                  { IPPROTO_TCP, TCP_KEEPINTVL, 5 },
                                  { IPPROTO_TCP, TCP_KEEPCNT, 3 },
                                  { IPPROTO_TCP, TCP_USER_TIMEOUT, 25000 } };
    for (const auto & option : keep_alive) {
        setsockopt(fd, option[0], option[1], &option[2], sizeof(option[2]));
    }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    sockaddr_in client;
    socklen_t   size = sizeof(client);
    if (getpeername(fd, reinterpret_cast<sockaddr *>(&client), &size) == 0) {
        printf("%s: ", inet_ntoa(client.sin_addr));
    }
}
