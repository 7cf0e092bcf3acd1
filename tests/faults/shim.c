// SPDX-License-Identifier: MIT
//
// A library to preload: the n-th call of a kind on certain files fails, is short, slow, or changes the file.
//
//   FAULT=call:kind:at:count:path:arm
//     call   read, write, open, sync (fsync and fdatasync), rename (link, too) or resize (ftruncate)
//     kind   none (only counts), the name of an errno, short, one (byte), end (of file), slow, hang, truncate, replace,
//            delete
//     at     number of the first call that is hit, from 0
//     count  how many calls are hit
//     path   part of the path of the files that are meant
//     arm    calls count from when this file exists; empty: at once
//
// fault_set() replaces FAULT in a running program, fault_count() says how many calls there were, fault_hits() how many
// of them were hit.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name)) real(#name))

static void * real(const char * name) {
    return dlsym(RTLD_NEXT, name);
}

//
// the rule
//

static const struct {
    const char * name;
    int          value;
} ERRNOS[] = {
    { "EIO", EIO },       { "EINTR", EINTR },   { "EAGAIN", EAGAIN }, { "ESTALE", ESTALE }, { "EMFILE", EMFILE },
    { "EACCES", EACCES }, { "ENOSPC", ENOSPC }, { "EDQUOT", EDQUOT }, { "EFBIG", EFBIG },   { "ENOMEM", ENOMEM },
};

static struct {
    char call[16];
    char kind[16];
    long at;
    long count;
    char path[256];
    char arm[256];
} g_rule;

static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static long            g_calls; // guarded by g_mutex, as is g_hits
static long            g_hits;

void fault_set(const char * text) {
    pthread_mutex_lock(&g_mutex);
    memset(&g_rule, 0, sizeof(g_rule));
    g_calls = g_hits = 0;
    sscanf(text, "%15[^:]:%15[^:]:%ld:%ld:%255[^:]:%255[^:]", g_rule.call, g_rule.kind, &g_rule.at, &g_rule.count,
           g_rule.path, g_rule.arm);
    pthread_mutex_unlock(&g_mutex);
}

long fault_count(void) {
    return g_calls;
}

long fault_hits(void) {
    return g_hits;
}

__attribute__((constructor)) static void begin(void) {
    const char * text = getenv("FAULT");
    if (text) {
        fault_set(text);
    }
}

static int is_meant(const char * call, const char * path) {
    return g_rule.path[0] && strcmp(g_rule.call, call) == 0 && path && strstr(path, g_rule.path) &&
           (!g_rule.arm[0] || access(g_rule.arm, F_OK) == 0);
}

static const char * path_of(int fd, char * buffer) {
    char link[64];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, buffer, PATH_MAX - 1);
    buffer[n > 0 ? n : 0] = 0;
    return buffer;
}

static void change_file(const char * path) {
    char other[PATH_MAX + 8];
    if (strcmp(g_rule.kind, "truncate") == 0) {
        struct stat st;
        if (stat(path, &st) == 0 && truncate(path, st.st_size / 2) != 0) {
            abort();
        }
    } else if (strcmp(g_rule.kind, "delete") == 0) {
        unlink(path);
    } else if (strcmp(g_rule.kind, "replace") == 0) { // by one that is as long, of other bytes
        struct stat st;
        snprintf(other, sizeof(other), "%s.new", path);
        const int fd = REAL(open)(other, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (stat(path, &st) == 0 && fd >= 0 && REAL(ftruncate)(fd, st.st_size) == 0) {
            REAL(rename)(other, path);
        }
        close(fd);
    }
}

// Returns true if the call must fail with errno, or be cut to *size bytes.
static int strike(const char * call, const char * path, size_t * size) {
    if (!is_meant(call, path)) {
        return 0;
    }
    pthread_mutex_lock(&g_mutex);
    const long n      = g_calls++;
    const int  is_hit = strcmp(g_rule.kind, "none") != 0 && n >= g_rule.at && n < g_rule.at + g_rule.count;
    g_hits += is_hit;
    pthread_mutex_unlock(&g_mutex);
    if (!is_hit) {
        return 0;
    }
    for (size_t i = 0; i < sizeof(ERRNOS) / sizeof(ERRNOS[0]); i++) {
        if (strcmp(g_rule.kind, ERRNOS[i].name) == 0) {
            errno = ERRNOS[i].value;
            return 1;
        }
    }
    if (strcmp(g_rule.kind, "slow") == 0 || strcmp(g_rule.kind, "hang") == 0) {
        const struct timespec time = { strcmp(g_rule.kind, "hang") == 0 ? 3600 : 0, 200 * 1000 * 1000 };
        nanosleep(&time, NULL);
    } else if (size && strcmp(g_rule.kind, "short") == 0) {
        *size = *size > 1 ? *size / 2 : 1;
    } else if (size && strcmp(g_rule.kind, "one") == 0) {
        *size = 1;
    } else if (size && strcmp(g_rule.kind, "end") == 0) {
        *size = 0;
    } else {
        change_file(path);
    }
    return 0;
}

//
// the calls
//

ssize_t read(int fd, void * buf, size_t n) {
    char path[PATH_MAX];
    return strike("read", g_rule.path[0] ? path_of(fd, path) : NULL, &n) ? -1 : n == 0 ? 0 : REAL(read)(fd, buf, n);
}

ssize_t pread(int fd, void * buf, size_t n, off_t at) {
    char path[PATH_MAX];
    return strike("read", g_rule.path[0] ? path_of(fd, path) : NULL, &n) ? -1 : n == 0 ? 0 : REAL(pread)(fd, buf, n, at);
}

ssize_t pread64(int fd, void * buf, size_t n, off_t at) {
    return pread(fd, buf, n, at);
}

size_t fread(void * buf, size_t size, size_t n, FILE * file) {
    char   path[PATH_MAX];
    size_t bytes = size * n;
    if (strike("read", g_rule.path[0] ? path_of(fileno(file), path) : NULL, &bytes)) {
        file->_flags |= 0x20; // glibc's mark of an error
        return 0;
    }
    return bytes == size * n ? REAL(fread)(buf, size, n, file) : REAL(fread)(buf, 1, bytes, file) / (size ? size : 1);
}

ssize_t write(int fd, const void * buf, size_t n) {
    char path[PATH_MAX];
    return strike("write", g_rule.path[0] ? path_of(fd, path) : NULL, &n) ? -1 : REAL(write)(fd, buf, n);
}

ssize_t pwrite(int fd, const void * buf, size_t n, off_t at) {
    char path[PATH_MAX];
    return strike("write", g_rule.path[0] ? path_of(fd, path) : NULL, &n) ? -1 : REAL(pwrite)(fd, buf, n, at);
}

ssize_t pwrite64(int fd, const void * buf, size_t n, off_t at) {
    return pwrite(fd, buf, n, at);
}

int open(const char * path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = va_arg(arguments, mode_t);
    va_end(arguments);
    return strike("open", path, NULL) ? -1 : REAL(open)(path, flags, mode);
}

int open64(const char * path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = va_arg(arguments, mode_t);
    va_end(arguments);
    return open(path, flags, mode);
}

FILE * fopen(const char * path, const char * mode) {
    return strike("open", path, NULL) ? NULL : REAL(fopen)(path, mode);
}

FILE * fopen64(const char * path, const char * mode) {
    return fopen(path, mode);
}

int fsync(int fd) {
    char path[PATH_MAX];
    return strike("sync", g_rule.path[0] ? path_of(fd, path) : NULL, NULL) ? -1 : REAL(fsync)(fd);
}

int fdatasync(int fd) {
    char path[PATH_MAX];
    return strike("sync", g_rule.path[0] ? path_of(fd, path) : NULL, NULL) ? -1 : REAL(fdatasync)(fd);
}

int rename(const char * from, const char * to) {
    return strike("rename", to, NULL) ? -1 : REAL(rename)(from, to);
}

int link(const char * from, const char * to) {
    return strike("rename", to, NULL) ? -1 : REAL(link)(from, to);
}

int linkat(int from_dir, const char * from, int to_dir, const char * to, int flags) {
    return strike("rename", to, NULL) ? -1 : REAL(linkat)(from_dir, from, to_dir, to, flags);
}

int ftruncate(int fd, off_t size) {
    char path[PATH_MAX];
    return strike("resize", g_rule.path[0] ? path_of(fd, path) : NULL, NULL) ? -1 : REAL(ftruncate)(fd, size);
}

int ftruncate64(int fd, off_t size) {
    return ftruncate(fd, size);
}
