// SPDX-License-Identifier: MIT
#include "base/files.h"

#include "ggml.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <sys/resource.h>

namespace hobbit {

static constexpr std::streamsize BUFFER_SIZE = 1 << 20;

static bool is_other_file(const std::string & path, const std::string & begin) {
    std::error_code ignored;
    if (!std::filesystem::is_regular_file(path, ignored) || std::filesystem::file_size(path, ignored) == 0) {
        return false;
    }
    std::ifstream file(path, std::ios::binary);
    std::string   found(begin.size(), '\0');
    file.read(&found[0], std::streamsize(found.size()));
    return found != begin;
}

status text_file::open(const std::string & path, const char * kind, const std::string & begin) {
    GGML_ASSERT(!is_open());
    path_  = path;
    kind_  = kind;
    error_ = {};
    if (is_other_file(path, begin)) {
        return status::error("'%s' exists and is not a %s: choose another file for the %s, or remove it", path.c_str(),
                             kind, kind);
    }
    buffer_.resize(BUFFER_SIZE);
    file_.rdbuf()->pubsetbuf(buffer_.data(), BUFFER_SIZE);
    file_.open(path);
    if (!is_open()) {
        return status::error("the %s '%s' cannot be written: %s; choose another file", kind, path.c_str(),
                             strerror(errno));
    }
    return append(begin.data(), begin.size());
}

status text_file::append(const char * text, size_t size) {
    GGML_ASSERT(is_open());
    errno = 0;
    if (error_.ok() && !file_.write(text, std::streamsize(size))) {
        fail(errno);
    }
    return error_;
}

status text_file::fail(const status & error) {
    if (error_.ok()) {
        error_ = error;
    }
    return error_;
}

status text_file::fail(int error) {
    return fail(status::error("the %s '%s' cannot be written: %s; free some space or choose another file", kind_,
                              path_.c_str(), strerror(error ? error : EIO)));
}

status text_file::close() {
    if (!is_open()) {
        return {};
    }
    errno = 0;
    file_.close();
    if (!file_) {
        fail(errno);
    }
    std::error_code ignored;
    if (!error_.ok() && std::filesystem::is_regular_file(path_, ignored)) {
        std::filesystem::remove(path_, ignored); // a device like /dev/full stays
    }
    return error_;
}

static constexpr rlim_t OTHERS = 256; // connections, libraries, devices

void allow_open_files(uint64_t n) {
    rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < n + OTHERS) {
        limit.rlim_cur = std::min<rlim_t>(n + OTHERS, limit.rlim_max);
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

std::string open_failure(int error) {
    const char * hint = error == EMFILE ? "; raise the limit of open files, in the shell: ulimit -n 65536" : "";
    return std::string(strerror(error)) + hint;
}

} // namespace hobbit
