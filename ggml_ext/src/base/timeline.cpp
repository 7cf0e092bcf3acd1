// SPDX-License-Identifier: MIT
#include "base/timeline.h"

#include <unistd.h>

namespace hobbit {

static thread_local const char * own_name = "computes";

void timeline::name_thread(const char * name) {
    own_name = name;
}

status timeline::open(const std::string & path) {
    mutex_lock lock(mutex_);
    threads_.clear();
    HOBBIT_TRY(file_.open(path, "timeline", "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n"));
    is_open_ = true;
    return {};
}

static double microseconds(timeline::clock::duration time) {
    return std::chrono::duration<double, std::micro>(time).count();
}

void timeline::add(const event & e) {
    const int         thread  = gettid();
    const std::string where   = format("\"pid\":%d,\"tid\":%d", getpid(), thread);
    std::string       text    = format("{\"ph\":\"X\",\"name\":\"%s\",%s,\"ts\":%.3f,\"dur\":%.3f,\"args\":{", e.name,
                                       where.c_str(), microseconds(e.begin.time_since_epoch()), microseconds(e.end - e.begin));
    text                     += e.key ? format("\"%s\":%lld}},\n", e.key, (long long) e.value) : "}},\n";
    mutex_lock lock(mutex_);
    if (!file_.is_open()) {
        return;
    }
    if (threads_.insert(thread).second) {
        text +=
            format("{\"ph\":\"M\",\"name\":\"thread_name\",%s,\"args\":{\"name\":\"%s\"}},\n", where.c_str(), own_name);
    }
    file_.append(text.data(), text.size()); // close returns its error
}

status timeline::close() {
    mutex_lock lock(mutex_);
    is_open_ = false;
    if (file_.is_open()) {
        const std::string end = format("{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":"
                                       "\"pyhobbit\"}}]}\n",
                                       getpid());
        file_.append(end.data(), end.size());
    }
    return file_.close();
}

} // namespace hobbit
