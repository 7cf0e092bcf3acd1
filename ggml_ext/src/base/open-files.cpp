// SPDX-License-Identifier: MIT
#include "base/open-files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/resource.h>

namespace hobbit {

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
