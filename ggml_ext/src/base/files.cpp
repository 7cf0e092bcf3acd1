// SPDX-License-Identifier: MIT
#include "base/files.h"

#include "ggml.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sys/resource.h>

namespace hobbit {

static constexpr size_t BUFFER_SIZE = 1 << 20;

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
    file_ = fopen(path.c_str(), "w");
    if (!file_) {
        return status::error("the %s '%s' cannot be written: %s; choose another file", kind, path.c_str(),
                             strerror(errno));
    }
    buffer_ = begin;
    return {};
}

status text_file::append(const char * text, size_t size) {
    GGML_ASSERT(is_open());
    if (!error_.ok()) {
        return error_;
    }
    buffer_.append(text, size);
    return buffer_.size() >= BUFFER_SIZE ? write_buffer() : status();
}

status text_file::write_buffer() {
    errno = 0;
    if (fwrite(buffer_.data(), 1, buffer_.size(), file_) != buffer_.size()) {
        fail(errno);
    }
    buffer_.clear();
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
    if (error_.ok()) {
        write_buffer();
    }
    errno = 0;
    if (fclose(file_) != 0) {
        fail(errno);
    }
    file_ = nullptr;
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
