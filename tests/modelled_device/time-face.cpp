// SPDX-License-Identifier: MIT
#include "ggml-cpu.h"
#include "host-threads.h"
#include "modelled-device.h"
#include "priced-graph.h"
#include "routing-script.h"

#include <cstring>
#include <map>
#include <sstream>

using namespace modelled;
using host_threads::scope;

static routing_script & script() {
    static routing_script one;
    return one;
}

namespace {

// CUDA captures a graph that comes again as it was, and replays it as long as it does.
class graph_memory {
  public:
    virtual_clock::start start_of(const ggml_cgraph * graph) {
        known &    it    = graphs_[graph->nodes[0]];
        const bool alike = is_alike(graph, it);
        if (!alike || host_threads::clock().price().captures == 0) {
            it.is_captured = false;
            return virtual_clock::start::direct;
        }
        return std::exchange(it.is_captured, true) ? virtual_clock::start::replay : virtual_clock::start::capture;
    }

  private:
    struct known {
        uint64_t uid         = 0;
        uint64_t hash        = 0;
        bool     is_captured = false;
    };

    static bool is_alike(const ggml_cgraph * graph, known & it) {
        if (graph->uid != 0 && graph->uid == it.uid) {
            return true;
        }
        const uint64_t before = std::exchange(it.hash, hash_of(graph));
        it.uid                = graph->uid;
        return before == it.hash;
    }

    static void add(uint64_t & hash, const void * at, size_t size) {
        for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
            uint64_t word = 0;
            std::memcpy(&word, static_cast<const char *>(at) + i, std::min(size - i, sizeof(word)));
            hash  = (hash ^ word) * 1099511628211u;
            hash ^= hash >> 29;
        }
    }

    static uint64_t hash_of(const ggml_cgraph * graph) {
        uint64_t hash = 14695981039346656037u;
        for (int i = 0; i < graph->n_nodes; i++) {
            add(hash, graph->nodes[i], sizeof(ggml_tensor));
            for (const ggml_tensor * source : graph->nodes[i]->src) {
                if (source) {
                    add(hash, &source->data, sizeof(source->data));
                    add(hash, source->ne, sizeof(source->ne));
                    add(hash, source->nb, sizeof(source->nb));
                }
            }
        }
        return hash;
    }

    std::map<const ggml_tensor *, known> graphs_; // [first node]
};

class time_face : public device_observer {
  public:
    void on_close(int stream) override { streams_.erase(stream); }

    void on_copy(const copy & what) override {
        scope here;
        if (what.way == direction::on_device) {
            clock_.compute(here.now(), streams_[what.stream].queue, virtual_clock::start::direct, 1,
                           device_time(1, 2 * what.source.size));
            return;
        }
        const resource link = what.way == direction::to_device ? resource::to_device : resource::to_host;
        if (what.stream == NO_STREAM) {
            clock_.copy_and_wait(here.now(), link, what.source.size, what.is_pinned);
        } else {
            clock_.copy(here.now(), streams_[what.stream].queue, link, what.source.size, what.is_pinned);
        }
    }

    void on_compute(int stream, ggml_cgraph * graph) override {
        scope here;
        script().write(graph);
        const graph_price p = price_of(graph);
        if (p.n_kernels > 0) {
            own & s = streams_[stream];
            clock_.compute(here.now(), s.queue, s.graphs.start_of(graph), p.n_kernels,
                           device_time(p.n_kernels, p.bytes));
        }
    }

    void on_synchronize(int stream) override {
        scope here;
        clock_.synchronize(here.now(), streams_[stream].queue);
    }

    void on_event_synchronize(int event) override {
        scope here;
        clock_.synchronize(here.now(), { events_[event] });
    }

    void on_record(int event, int stream) override {
        scope here;
        events_[event] = clock_.record(here.now(), streams_[stream].queue);
    }

    void on_wait(int event, int stream) override {
        scope here;
        clock_.let_wait(here.now(), streams_[stream].queue, events_[event]);
    }

    std::string report() override {
        const scope                            here;
        const costs &                          c     = clock_.sums();
        const std::pair<const char *, int64_t> all[] = {
            { "launches", c.launches },
            { "replays", c.replays },
            { "captures", c.captures },
            { "waits", c.waits },
            { "copies", c.copies },
            { "reads", c.reads },
            { "copied_bytes", c.copied_bytes },
            { "host", c.host },
            { "others", c.others },
            { "calls", c.calls },
            { "waited", c.waited },
            { "device", busy({ resource::device }) },
            { "link", busy({ resource::to_device }) },
            { "cpu", busy({ resource::cpu }) },
            { "any", busy({ resource::device, resource::to_device, resource::cpu }) },
        };
        std::ostringstream text;
        for (const auto & [name, value] : all) {
            text << (text.tellp() == 0 ? '{' : ',') << '"' << name << "\":" << value;
        }
        return text.str() + '}';
    }

  private:
    struct own {
        virtual_clock::stream queue;
        graph_memory          graphs;
    };

    ns_t device_time(uint64_t n_kernels, uint64_t bytes) const {
        const prices & p = clock_.price();
        return virtual_clock::us(double(n_kernels) * p.kernel_us) + ns_t(double(bytes) / p.device_gbs);
    }

    // Counts the time until now.
    int64_t busy(std::initializer_list<resource> any) const { return clock_.busy(0, scope().now(), any); }

    virtual_clock &     clock_ = host_threads::clock();
    std::map<int, own>  streams_;
    std::map<int, ns_t> events_;
};

} // namespace

std::unique_ptr<device_observer> modelled::make_time_face(const settings &) {
    return std::make_unique<time_face>();
}

extern "C" {
// The CPU backend's: its cores take the time in which they read the weights.
MODELLED_API ggml_status ggml_graph_compute(ggml_cgraph * graph, ggml_cplan *) {
    scope    here;
    uint64_t n_nodes = 0;
    uint64_t bytes   = 0;
    for (int i = 0; i < graph->n_nodes; i++) {
        n_nodes += !computes_nothing(graph->nodes[i]);
        bytes   += weight_bytes(graph->nodes[i]);
    }
    script().write(graph);
    if (bytes > 0) {
        host_threads::clock().compute_on_cpu(here.now(), n_nodes, bytes);
    }
    return GGML_STATUS_SUCCESS;
}

// The calling thread and those that it makes are in virtual time.
MODELLED_API void modelled_begin() {
    host_threads::begin();
}

MODELLED_API void modelled_route(const routing_script::table * table) {
    script().use(*table);
}

// Lets the calling thread's code take time, or none.
MODELLED_API void modelled_count_code(bool on) {
    host_threads::count_code(on);
}

// The calling thread's time in ns.
MODELLED_API int64_t modelled_now() {
    return scope().now();
}
}
