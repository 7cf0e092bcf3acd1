// SPDX-License-Identifier: MIT
#include "io/file-reader.h"

#include "base/files.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <unistd.h>

namespace hobbit {

static bool is_same(const struct stat & a, const struct stat & b) {
    return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

static status posix_error(const std::string & path, const char * what) {
    return status::error("cannot %s '%s': %s", what, path.c_str(), open_failure(errno).c_str());
}

posix_file_reader::~posix_file_reader() {
    for (const auto & file : files_) {
        close(file->fd);
    }
}

status posix_file_reader::open(const std::string & path) {
    bool direct = true;
    int  fd     = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd < 0 && errno == EINVAL) {
        direct = false;
        fd     = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    }
    if (fd < 0) {
        return posix_error(path, "open");
    }

    open_file & file = *files_.emplace_back(std::make_unique<open_file>()); // the destructor closes it
    file.path        = path;
    file.fd          = fd;
    file.direct      = direct;
    return fstat(fd, &file.opened) == 0 ? status() : posix_error(path, "examine");
}

status posix_file_reader::check_unchanged(const open_file & file) {
    struct stat st;
    const bool  is_open = fstat(file.fd, &st) == 0;
    if (!is_open && errno != EBADF) {
        return posix_error(file.path, "examine");
    }
    if (!is_open || !is_same(st, file.opened)) {
        return status::error("this program closed the descriptor by which '%s' is read: load the model again",
                             file.path.c_str());
    }
    if (st.st_size != file.opened.st_size || st.st_mtim.tv_sec != file.opened.st_mtim.tv_sec ||
        st.st_mtim.tv_nsec != file.opened.st_mtim.tv_nsec) {
        return status::error("'%s' changed while it was in use: load the model again", file.path.c_str());
    }
    return {};
}

status posix_file_reader::read_at(uint32_t index, uint64_t offset, size_t size, size_t needed, void * buf) {
    open_file & file = *files_[index];

    HOBBIT_TRY(check_unchanged(file));
    size_t done = 0;
    while (done < needed) {
        const bool    direct = file.direct;
        const ssize_t n      = pread(file.fd, static_cast<char *>(buf) + done, size - done, offset + done);
        if (n > 0) {
            done += n;
            continue;
        }
        if (n == 0) {
            return status::error("'%s' ends at byte %llu where weights were expected: it is truncated",
                                 file.path.c_str(), (unsigned long long) (offset + done));
        }
        if (errno == EINVAL && direct) {
            // accepted at open, refused at read: the file system has no direct I/O after all; the flag goes last, so
            // that whoever sees it cleared reads through the page cache
            fcntl(file.fd, F_SETFL, fcntl(file.fd, F_GETFL) & ~O_DIRECT);
            file.direct = false;
            continue;
        }
        if (errno != EINTR) {
            return posix_error(file.path, "read");
        }
    }

    if (!file.direct) {
        posix_fadvise(file.fd, offset, size, POSIX_FADV_DONTNEED); // the pools are the cache
    }
    return check_unchanged(file); // it may have changed during the read
}

status posix_file_reader::check_in_place() const {
    for (const auto & file : files_) {
        struct stat now;
        if (stat(file->path.c_str(), &now) == 0 && !is_same(file->opened, now)) {
            return status::error(
                format("'%s' was replaced while it was opened: load the model again", file->path.c_str()));
        }
    }
    return {};
}

bool posix_file_reader::direct_io() const {
    return std::all_of(files_.begin(), files_.end(), [](const auto & file) { return bool(file->direct); });
}

// A driver that has no more pinned memory returns ordinary memory. Where a driver maps pinned memory in a special way,
// the system may refuse direct I/O into it.
static status try_memory(ggml_backend_buffer_type_t memory, file_reader & reader) {
    const size_t                  a = file_reader::alignment;
    const ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(memory, 2 * a));
    if (!buffer || ggml_backend_buffer_get_type(buffer.get()) != memory) {
        return status::error("the driver gives none");
    }
    return reader.read_at(0, 0, a, 1, aligned_base(buffer.get(), a));
}

ggml_backend_buffer_type_t find_pinned_memory(const std::vector<ggml_backend_dev_t> & devices, file_reader & reader) {
    for (ggml_backend_dev_t device : devices) {
        ggml_backend_buffer_type_t memory = ggml_backend_dev_host_buffer_type(device);
        if (!memory) {
            continue;
        }
        const status s = try_memory(memory, reader);
        if (s.ok()) {
            return memory;
        }
        GGML_LOG_WARN("hobbit: experts are copied to %s from ordinary memory, which is slower than from page-locked "
                      "memory (%s)\n",
                      ggml_backend_dev_name(device), s.message().c_str());
    }
    return ggml_backend_cpu_buffer_type();
}

} // namespace hobbit
