// SPDX-License-Identifier: MIT
#include "base/system-memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

namespace hobbit {

static constexpr uint64_t UNLIMITED = std::numeric_limits<uint64_t>::max();

static std::string & system_root() {
    static std::string folder;
    return folder;
}

void set_system_root(const std::string & folder) {
    system_root() = folder;
}

std::string meminfo_path() {
    return system_root() + "/proc/meminfo";
}

uint64_t resident_memory() {
    std::ifstream in("/proc/self/statm");
    uint64_t      total    = 0;
    uint64_t      resident = 0;
    in >> total >> resident;
    return resident * uint64_t(sysconf(_SC_PAGESIZE));
}

// The value of "KEY  123 kB" in kB-valued files, or of "KEY 123".
static bool read_field(const std::string & path, const std::string & key, uint64_t & value) {
    std::ifstream in(path);
    std::string   line;
    while (std::getline(in, line)) {
        std::istringstream words(line);
        std::string        name;
        uint64_t           number = 0;
        if (words >> name >> number && name == key) {
            value = number;
            return true;
        }
    }
    return false;
}

static uint64_t read_limit(const std::string & path) {
    std::ifstream in(path);
    uint64_t      value = 0;
    return in >> value ? value : UNLIMITED; // "max", or no such file
}

// Room that one memory cgroup leaves: the limit in its folder `dir` less the memory in use. Page cache that can be
// reclaimed, which memory.stat has under `cache_key`, does not count as used.
static uint64_t cgroup_room(const std::string & dir, const char * limit_file, const char * usage_file,
                            const char * cache_key) {
    const uint64_t limit = read_limit(dir + limit_file);
    const uint64_t usage = read_limit(dir + usage_file);
    if (limit == UNLIMITED || usage == UNLIMITED) {
        return UNLIMITED;
    }
    uint64_t cache = 0;
    read_field(dir + "memory.stat", cache_key, cache);
    const uint64_t used = usage - std::min(usage, cache);
    return limit - std::min(limit, used);
}

// /proc/self/cgroup: "0::/path" for v2, "7:memory:/path" for v1. The limits of all ancestors hold.
static uint64_t cgroups_room() {
    std::ifstream in(system_root() + "/proc/self/cgroup");
    std::string   line;
    uint64_t      room = UNLIMITED;
    while (std::getline(in, line)) {
        const size_t first  = line.find(':');
        const size_t second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            continue;
        }
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const bool        v2          = controllers.empty();
        if (!v2 && controllers.find("memory") == std::string::npos) {
            continue;
        }
        std::string path = line.substr(second + 1);
        while (true) {
            const std::string dir = system_root() + (v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory") + path + "/";
            room = std::min(room, v2 ? cgroup_room(dir, "memory.max", "memory.current", "inactive_file")
                                     : cgroup_room(dir, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                                   "total_inactive_file"));
            if (path.empty() || path == "/") {
                break;
            }
            path.erase(path.find_last_of('/'));
        }
    }
    return room;
}

uint64_t available_memory() {
    uint64_t kilobytes = 0;
    if (!read_field(meminfo_path(), "MemAvailable:", kilobytes)) {
        kilobytes = uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE)) / 1024;
    }
    return std::min(kilobytes * 1024, cgroups_room());
}

char * aligned_base(ggml_backend_buffer_t buffer, size_t alignment) {
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(buffer));
    return base + (alignment - uintptr_t(base) % alignment) % alignment;
}

void ask_for_huge_pages(char * base, size_t size) {
#ifdef MADV_HUGEPAGE
    madvise(base, size, MADV_HUGEPAGE);
#endif
}

} // namespace hobbit
