// SPDX-License-Identifier: MIT
//
// Finds what a program does with a device in no order. Threads of the host and streams have vector clocks; each byte
// of a device's memory knows who wrote it last and who has read it since. An access that is not ordered behind those
// it depends on is an error, whatever the timing was. So is a source that changed before its copy was known to have
// ended. A stream's copy appears in host memory only when a thread of the host has waited for it.
#include "modelled-device.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <fcntl.h>
#include <functional>
#include <map>
#include <pthread.h>
#include <string_view>
#include <sys/uio.h>
#include <unistd.h>
#include <vector>

namespace modelled {

using clock_time = uint32_t;

// The deeds of each actor that are known: all up to a time of its own. Thread-safety: none.
class vector_clock {
  public:
    clock_time at(int who) const { return size_t(who) < times_.size() ? times_[size_t(who)] : 0; }

    void tick(int who) {
        times_.resize(std::max(times_.size(), size_t(who) + 1));
        times_[size_t(who)]++;
    }

    void join(const vector_clock & other) {
        times_.resize(std::max(times_.size(), other.times_.size()));
        for (size_t i = 0; i < other.times_.size(); i++) {
            times_[i] = std::max(times_[i], other.times_[i]);
        }
    }

  private:
    std::vector<clock_time> times_;
};

// One of those who act: a thread of the host, or a stream.
struct actor {
    std::string  name;
    int          device; // -1: the host
    vector_clock clock;
};

// A deed of an actor, at a time of its own.
struct access {
    int                                who  = -1; // -1: nobody
    clock_time                         when = 0;
    std::shared_ptr<const std::string> what; // and by whom
};

// Neighbouring bytes with the same past.
struct segment {
    const char *        end;
    int                 device;
    access              writer;
    std::vector<access> readers; // since then, one for each actor
};

// A copy of a stream of which no thread of the host knows that it has ended.
struct pending {
    access            by;
    copy              what;  // its tensor may be gone
    size_t            hash;  // the source's
    std::vector<char> taken; // bytes that the target will hold
};

// Through a file, since a source may be unmapped meanwhile.
static size_t hash_of(bytes range) {
    static const int  own = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    std::vector<char> now(range.size);
    const iovec       to = { now.data(), now.size() };
    const ssize_t     n  = preadv(own, &to, 1, off_t(uintptr_t(range.data))); // no read of the program's
    return std::hash<std::string_view>()({ now.data(), size_t(std::max(n, ssize_t(0))) });
}

static constexpr char NOT_YET = char(0xff); // numbers are then -1, and floats no numbers

static std::string copy_name(const copy & c) {
    return std::string("a copy of ") + (*c.tensor ? c.tensor : "a tensor without a name");
}

static bytes bytes_of(const ggml_tensor * t) {
    return { static_cast<const char *>(t->data), ggml_nbytes(t) };
}

class order_face : public device_observer {
  public:
    void on_open(int stream, int device) override {
        streams_[stream] =
            make_actor("stream " + std::to_string(stream) + " of device " + std::to_string(device), device);
    }

    void on_allocate(int device, bytes memory) override {
        memory_[memory.data] = { memory.data + memory.size, device, {}, {} };
    }

    void on_free(int stream, bytes memory) override {
        write(memory, access_of(doer(stream), "a free"));
        memory_.erase(memory_.lower_bound(memory.data), memory_.lower_bound(memory.data + memory.size));
    }

    void on_copy(const copy & c) override {
        const access by = access_of(doer(c.stream), copy_name(c));
        if (c.way != direction::to_device) {
            read(c.source, by);
        }
        if (c.way != direction::to_host) {
            write(c.target, by);
        }
        if (c.way == direction::to_device && !c.is_taken) {
            pending_.push_back({ by, c, hash_of(c.source), {} });
        }
    }

    void on_copied(const copy & c) override {
        const auto is_same = [&](const pending & p) {
            return p.what.stream == c.stream && p.what.way == c.way && p.what.target.data == c.target.data;
        };
        const auto before = std::find_if(pending_.begin(), pending_.end(), is_same);
        if (c.stream == NO_STREAM && before != pending_.end()) {
            end(*before);
            pending_.erase(before);
        } else if (c.stream != NO_STREAM && c.way == direction::to_host) {
            const access      by = access_of(streams_.at(c.stream), copy_name(c));
            std::vector<char> taken(c.target.data, c.target.data + c.target.size);
            std::memset(const_cast<char *>(c.target.data), NOT_YET, c.target.size);
            if (before != pending_.end()) {
                pending_.erase(before); // this one takes its place
            }
            pending_.push_back({ by, c, 0, std::move(taken) });
        }
    }

    void on_clear(int stream, bytes target) override { write(target, access_of(doer(stream), "a clear")); }

    void on_compute(int stream, ggml_cgraph * graph) override {
        const int who = begin(stream);
        for (int n = 0; n < ggml_graph_n_nodes(graph); n++) {
            const ggml_tensor * node = ggml_graph_node(graph, n);
            if (computes_nothing(node) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
                continue;
            }
            const access by = access_of(who, std::string(ggml_op_name(node->op)) + " " + node->name);
            for (int i = 0; i < GGML_MAX_SRC; i++) {
                if (node->src[i] && node->src[i]->data) {
                    read_source(node, i, by);
                }
            }
            write(bytes_of(node), by);
        }
    }

    void on_synchronize(int stream) override { learn(actors_[size_t(streams_.at(stream))].clock); }
    void on_event_synchronize(int event) override { learn(events_[event]); }
    void on_record(int event, int stream) override { events_[event] = actors_[size_t(begin(stream))].clock; }
    void on_wait(int event, int stream) override { actors_[size_t(begin(stream))].clock.join(events_[event]); }

    std::string report() override {
        std::string found;
        for (const auto & [what, n] : errors_) {
            found += (found.empty() ? "\"" : ", \"") + what + "\"";
        }
        return "{\"accesses\": " + std::to_string(n_accesses_) + ", \"waits\": " + std::to_string(n_waits_) +
               ", \"events\": " + std::to_string(events_.size()) + ", \"errors\": [" + found + "]}";
    }

    // A thread reads a file into memory that kernels read too.
    void on_read(bytes target) { write(target, access_of(this_thread(), "a read of a file")); }

    // Between threads of the host.
    void acquire(const void * lock, bool is_last) {
        thread().clock.join(locks_[lock]);
        if (is_last) {
            locks_.erase(lock);
        }
    }

    // The thread gives away its past. Its future is not part of that.
    vector_clock release() {
        const int          own   = this_thread();
        const vector_clock given = actors_[size_t(own)].clock;
        actors_[size_t(own)].clock.tick(own);
        return given;
    }

    vector_clock & lock(const void * address) { return locks_[address]; }

  private:
    int make_actor(const std::string & name, int device) {
        actors_.push_back({ name, device, {} });
        actors_.back().clock.tick(int(actors_.size()) - 1);
        return int(actors_.size()) - 1;
    }

    int this_thread() {
        static thread_local int own = -1;
        if (own < 0) {
            own = make_actor("thread " + std::to_string(actors_.size() - streams_.size()), -1);
        }
        return own;
    }

    actor & thread() { return actors_[size_t(this_thread())]; }

    // The stream is given something by this thread.
    int begin(int stream) {
        const vector_clock host  = release();
        const int          own   = streams_.at(stream);
        vector_clock &     clock = actors_[size_t(own)].clock;
        clock.join(host);
        clock.tick(own);
        return own;
    }

    int    doer(int stream) { return stream == NO_STREAM ? this_thread() : begin(stream); }
    access access_of(int who, const std::string & what) const {
        const actor & own = actors_[size_t(who)];
        return { who, own.clock.at(who), std::make_shared<const std::string>(what + " by " + own.name) };
    }

    // The segments within the range, which end where it does. Memory of the host has none. Kernels of a device cannot
    // reach that of another one.
    template <typename F>
    void each_segment(bytes range, const access & by, F visit) {
        const auto cut = [&](const char * at) {
            auto next = memory_.upper_bound(at);
            if (next == memory_.begin()) {
                return;
            }
            auto here = std::prev(next);
            if (here->first < at && at < here->second.end) {
                memory_.emplace_hint(next, at, here->second);
                here->second.end = at;
            }
        };
        const char * end = range.data + range.size;
        cut(range.data);
        cut(end);
        for (auto s = memory_.lower_bound(range.data); s != memory_.end() && s->first < end; s++) {
            n_accesses_++;
            const int device = actors_[size_t(by.who)].device;
            if (device >= 0 && device != s->second.device) {
                error(*by.what + " is in memory of another device");
            }
            visit(s->second);
        }
    }

    void read(bytes range, const access & by) {
        each_segment(range, by, [&](segment & s) {
            check(by, s.writer);
            const auto own =
                std::find_if(s.readers.begin(), s.readers.end(), [&](const auto & r) { return r.who == by.who; });
            if (own == s.readers.end()) {
                s.readers.push_back(by);
            } else {
                *own = by;
            }
        });
    }

    void write(bytes range, const access & by) {
        each_segment(range, by, [&](segment & s) {
            check(by, s.writer);
            for (const access & reader : s.readers) {
                check(by, reader);
            }
            s.writer = by;
            s.readers.clear();
        });
    }

    void check(const access & now, const access & before) {
        if (before.who >= 0 && before.when > actors_[size_t(now.who)].clock.at(before.who)) {
            error(*now.what + " is not ordered behind " + *before.what);
        }
    }

    // A matmul over experts reads those that were chosen, where that is known before the graph runs.
    void read_source(const ggml_tensor * node, int i, const access & by) {
        const ggml_tensor * src  = node->src[i];
        const ggml_tensor * ids  = node->op == GGML_OP_MUL_MAT_ID && i == 0 ? node->src[2] : nullptr;
        const ggml_op       made = ids ? (ids->view_src ? ids->view_src : ids)->op : GGML_OP_COUNT;
        if (made != GGML_OP_NONE && made != GGML_OP_GET_ROWS) {
            read(bytes_of(src), by);
            return;
        }
        for (int64_t n = 0; n < ggml_nelements(ids); n++) {
            const int32_t id = expert_at(ids, n);
            if (id >= 0 && id < src->ne[2]) {
                read({ static_cast<const char *>(src->data) + size_t(id) * src->nb[2],
                       src->nb[1] * size_t(src->ne[1]) },
                     by);
            }
        }
    }

    // The thread has waited.
    void learn(const vector_clock & clock) {
        n_waits_++;
        vector_clock & own = thread().clock;
        own.join(clock);
        const auto is_over = [&](const pending & p) { return p.by.when <= own.at(p.by.who); };
        const auto over    = std::stable_partition(pending_.begin(), pending_.end(), std::not_fn(is_over));
        std::for_each(over, pending_.end(), [&](const pending & p) { end(p); });
        pending_.erase(over, pending_.end());
    }

    void end(const pending & p) {
        const std::string of = " of " + *p.by.what;
        if (p.what.way == direction::to_device) {
            if (hash_of(p.what.source) != p.hash) {
                error("the source" + of + " changed before its end");
            }
            return;
        }
        const bytes & to = p.what.target;
        if (std::any_of(to.data, to.data + to.size, [](char c) { return c != NOT_YET; })) {
            error("the target" + of + " changed before its end");
        }
        std::memcpy(const_cast<char *>(to.data), p.taken.data(), to.size);
    }

    void error(const std::string & what) {
        if (errors_[what]++ == 0) {
            std::fprintf(stderr, "modelled device: %s\n", what.c_str());
        }
    }

    std::deque<actor>                    actors_;  // references stay valid
    std::map<int, int>                   streams_; // actors
    std::map<int, vector_clock>          events_;
    std::map<const void *, vector_clock> locks_;
    std::map<const char *, segment>      memory_;
    std::vector<pending>                 pending_;
    std::map<std::string, size_t>        errors_; // and how often
    size_t                               n_accesses_ = 0;
    size_t                               n_waits_    = 0;
};

std::unique_ptr<device_observer> make_face() {
    return std::make_unique<order_face>();
}

//
// threads of the host
//

// The lock of the devices orders nothing in the program.
template <typename F>
static void hear_of(const void * lock, F what) {
    if (face && lock != &device_lock()) { // it is made before the threads that matter
        tell([&](device_observer & o) { what(static_cast<order_face &>(o)); });
    }
}

static void acquired(const void * lock, bool is_last = false) {
    hear_of(lock, [&](order_face & own) { own.acquire(lock, is_last); });
}

static void releasing(const void * lock) { // the thread knew the past of those who had the lock before
    hear_of(lock, [&](order_face & own) { own.lock(lock) = own.release(); });
}

} // namespace modelled

using namespace modelled;

template <typename F>
static F * next(const char * name) {
    return reinterpret_cast<F *>(dlsym(RTLD_NEXT, name));
}

// A thread that is made, and one that ends, counts as a lock: its maker, or the thread itself, releases it, and who
// begins or has waited acquires it, the last to do so: another one may get its address.
struct beginning {
    void * (*run)(void *);
    void * argument;
};

static void * begin(void * given) {
    acquired(given, true);
    const beginning own = *static_cast<beginning *>(given);
    delete static_cast<beginning *>(given);
    void * result = own.run(own.argument);
    releasing(reinterpret_cast<const void *>(pthread_self()));
    return result;
}

#pragma GCC visibility push(default)
extern "C" {

int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * argument) {
    static const auto real = next<decltype(pthread_create)>("pthread_create");
    auto *            made = new beginning{ run, argument };
    releasing(made);
    return real(thread, attributes, begin, made);
}

int pthread_join(pthread_t thread, void ** result) {
    static const auto real = next<decltype(pthread_join)>("pthread_join");
    const int         code = real(thread, result);
    if (code == 0) {
        acquired(reinterpret_cast<const void *>(thread), true);
    }
    return code;
}

// ggml, llama.cpp and hobbit call no other functions for locks.

int pthread_mutex_lock(pthread_mutex_t * mutex) {
    static const auto real = next<decltype(pthread_mutex_lock)>("pthread_mutex_lock");
    const int         code = real(mutex);
    acquired(mutex);
    return code;
}

int pthread_mutex_unlock(pthread_mutex_t * mutex) {
    static const auto real = next<decltype(pthread_mutex_unlock)>("pthread_mutex_unlock");
    releasing(mutex);
    return real(mutex);
}

int pthread_cond_wait(pthread_cond_t * condition, pthread_mutex_t * mutex) {
    static const auto real = next<decltype(pthread_cond_wait)>("pthread_cond_wait");
    releasing(mutex);
    const int code = real(condition, mutex);
    acquired(mutex);
    return code;
}

int pthread_cond_clockwait(pthread_cond_t * condition, pthread_mutex_t * mutex, clockid_t clock,
                           const timespec * time) {
    static const auto real = next<decltype(pthread_cond_clockwait)>("pthread_cond_clockwait");
    releasing(mutex);
    const int code = real(condition, mutex, clock, time);
    acquired(mutex);
    return code;
}

ssize_t pread(int file, void * to, size_t size, off_t offset) {
    static const auto real = next<decltype(pread)>("pread");
    hear_of(nullptr, [&](order_face & own) { own.on_read({ static_cast<const char *>(to), size }); });
    return real(file, to, size, offset);
}

} // extern "C"
#pragma GCC visibility pop
