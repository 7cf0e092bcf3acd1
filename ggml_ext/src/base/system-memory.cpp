// SPDX-License-Identifier: MIT
#include "base/system-memory.h"

#include "hobbit.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <unistd.h>

namespace hobbit {

static constexpr uint64_t UNLIMITED = std::numeric_limits<uint64_t>::max();

static std::string system_root;

void set_system_root(const std::string & folder) {
    system_root = folder;
}

// The value of "KEY  123 kB" in kB-valued files, of "KEY 123", or with has_type of "KEY 4 123".
static std::optional<uint64_t> read_field(const std::string & path, const std::string & key, bool has_type = false) {
    std::ifstream in(path);
    std::string   line;
    while (std::getline(in, line)) {
        std::istringstream words(line);
        std::string        name;
        uint64_t           number = 0;
        if (words >> name >> number && name == key && (!has_type || words >> number)) {
            return number;
        }
    }
    return {};
}

static uint64_t read_limit(const std::string & path) {
    std::ifstream in(path);
    uint64_t      value = 0;
    return in >> value ? value : UNLIMITED; // "max", or no such file
}

// A memory cgroup, of version 1 or 2.
struct cgroup {
    std::string dir;
    bool        v2;

    // Above memory.high the kernel slows a process down until it frees memory.
    uint64_t limit() const {
        return v2 ? std::min(read_limit(dir + "memory.max"), read_limit(dir + "memory.high"))
                  : read_limit(dir + "memory.limit_in_bytes");
    }

    // Room that it leaves: its limit less the memory in use. Page cache and the like, which the kernel drops before
    // it ends a process, do not count as used.
    uint64_t room() const {
        const uint64_t most  = limit();
        const uint64_t usage = read_limit(dir + (v2 ? "memory.current" : "memory.usage_in_bytes"));
        if (most == UNLIMITED || usage == UNLIMITED) {
            return UNLIMITED;
        }
        uint64_t reclaimable = 0;
        for (const char * key : { "active_file", "inactive_file", "slab_reclaimable" }) {
            reclaimable += read_field(dir + "memory.stat", (v2 ? "" : "total_") + std::string(key)).value_or(0);
        }
        const uint64_t used = usage - std::min(usage, reclaimable);
        return most - std::min(most, used);
    }
};

// The least of a value of all memory cgroups that hold for this process: its own ones and their ancestors.
// /proc/self/cgroup: "0::/path" for v2, "7:memory:/path" for v1.
static uint64_t least_of_cgroups(uint64_t (cgroup::*value)() const) {
    std::ifstream in(system_root + "/proc/self/cgroup");
    std::string   line;
    uint64_t      least = UNLIMITED;
    while (std::getline(in, line)) {
        std::istringstream fields(line);
        std::string        number, controllers, path;
        std::getline(std::getline(std::getline(fields, number, ':'), controllers, ':'), path);
        const bool v2 = controllers.empty();
        if (!fields || (!v2 && controllers.find("memory") == std::string::npos)) {
            continue;
        }
        while (true) {
            const std::string root = system_root + (v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
            least                  = std::min(least, (cgroup{ root + path + "/", v2 }.*value)());
            if (path.empty() || path == "/") {
                break;
            }
            path.erase(path.find_last_of('/'));
        }
    }
    return least;
}

static uint64_t machine_memory(const char * key) {
    const auto kilobytes = read_field(system_root + "/proc/meminfo", key);
    return kilobytes ? *kilobytes * 1024 : uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
}

// ZFS keeps its page cache in memory that the kernel counts as used, and frees it down to c_min.
static uint64_t reclaimable_of_zfs() {
    const auto field = [](const char * key) {
        return read_field(system_root + "/proc/spl/kstat/zfs/arcstats", key, true).value_or(0);
    };
    const uint64_t size = field("size");
    return std::min(size - std::min(size, field("c_min")), field("mru_evictable_data") + field("mfu_evictable_data"));
}

bool has_display() {
    std::error_code none;
    const bool      has_server = !std::filesystem::is_empty(system_root + "/tmp/.X11-unix", none) && !none;
    const auto      is_set     = [](const char * name) {
        const char * value = std::getenv(name);
        return value && *value;
    };
    return has_server || is_set("DISPLAY") || is_set("WAYLAND_DISPLAY");
}

char * aligned_base(ggml_backend_buffer_t buffer, size_t alignment) {
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(buffer));
    return base + (alignment - uintptr_t(base) % alignment) % alignment;
}

char * page_of(char * address) {
    static const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
    return address - uintptr_t(address) % page;
}

} // namespace hobbit

using namespace hobbit;

// In kB, whatever a page is: statm counts pages of the kernel, and an emulator may report others to this process.
uint64_t hobbit_resident_memory(void) {
    return read_field("/proc/self/status", "VmRSS:").value_or(0) * 1024;
}

uint64_t hobbit_available_memory(void) {
    return std::min(machine_memory("MemAvailable:") + reclaimable_of_zfs(), least_of_cgroups(&cgroup::room));
}

uint64_t hobbit_memory_limit(void) {
    return std::min(machine_memory("MemTotal:"), least_of_cgroups(&cgroup::limit));
}
