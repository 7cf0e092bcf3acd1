// SPDX-License-Identifier: MIT
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "host-threads.h"
#include "modelled-device.h"

#include <cstdio>
#include <cstring>
#include <list>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string_view>
#include <vector>

using namespace modelled;
using host_threads::now;

//
// prices of graphs
//

// Costs of a graph: kernels as CUDA's backend starts them, with its fusions, and bytes of weights that they read.
struct graph_price {
    uint64_t n_kernels = 0;
    uint64_t bytes     = 0;
};

// Weights that a product reads; MUL_MAT_ID reads the experts that its ids name.
static std::vector<bytes> weights_of(const ggml_tensor * t) {
    const ggml_tensor * w  = t->src[0];
    const auto          at = [&](int64_t n) { return static_cast<const char *>(w->data) + size_t(n) * w->nb[2]; };
    if (t->op == GGML_OP_MUL_MAT) {
        return { { at(0), ggml_nbytes(w) } };
    }
    std::set<int32_t>  experts;
    std::vector<bytes> all;
    for (int64_t n = 0; t->op == GGML_OP_MUL_MAT_ID && n < ggml_nelements(t->src[2]); n++) {
        if (const int32_t expert = expert_at(t->src[2], n); experts.insert(expert).second) {
            all.push_back({ at(expert), size_t(w->ne[1]) * ggml_row_size(w->type, w->ne[0]) });
        }
    }
    return all;
}

// The host uses memory of a mapped file, in whole blocks, and waits for what the page cache has not: it has the blocks
// that were used last.
static void use_mapped(ns_t & host, bytes range) {
    using list                         = std::list<uintptr_t>;
    static constexpr uint64_t BLOCK    = 1 << 20;
    static auto &             order    = *new list; // the last used one first
    static auto &             places   = *new std::map<uintptr_t, list::iterator>;
    const prices &            p        = host_threads::clock().price();
    uint64_t                  n_missed = 0;
    const uintptr_t           end      = p.fault_gbs > 0 ? uintptr_t(range.data) + range.size : 0;
    for (uintptr_t block = uintptr_t(range.data) / BLOCK; block * BLOCK < end; block++) {
        const auto known = places.find(block);
        if (known == places.end()) {
            n_missed++;
            order.push_front(block);
            places[block] = order.begin();
        } else {
            order.splice(order.begin(), order, known->second);
        }
    }
    for (; double(order.size() * BLOCK) > p.cache_gb * 1e9; order.pop_back()) {
        places.erase(order.back());
    }
    host_threads::clock().read(host, n_missed * BLOCK, p.fault_gbs);
}

// Kernels of a node that the ones before it have not computed along. `last` is the operation before it.
static uint64_t kernels_of(const ggml_tensor * t, const ggml_tensor * last) {
    const ggml_op before = last ? last->op : GGML_OP_NONE;
    switch (t->op) {
        case GGML_OP_MUL_MAT: // a kernel quantizes the input
            return ggml_is_quantized(t->src[0]->type) ? 2 : 1;
        case GGML_OP_MUL_MAT_ID: // gate and up of a token are one
            return before == GGML_OP_MUL_MAT_ID && last->src[1] == t->src[1] && t->ne[2] == 1 ? 0 : 2;
        case GGML_OP_GLU: return before == GGML_OP_MUL_MAT_ID && t->ne[2] == 1 ? 0 : 1;
        case GGML_OP_MUL: return before == GGML_OP_RMS_NORM ? 0 : 1;
        case GGML_OP_ADD: // the sum over experts is one
            return before == GGML_OP_MUL || before == GGML_OP_ADD ? 0 : 1;
        case GGML_OP_ARGSORT: // the whole choice of experts is one
        case GGML_OP_TOP_K:
        case GGML_OP_GET_ROWS:
        case GGML_OP_SUM_ROWS:
        case GGML_OP_CLAMP:
        case GGML_OP_DIV:
            return before == GGML_OP_SOFT_MAX || before == GGML_OP_ARGSORT || before == GGML_OP_TOP_K ||
                           before == GGML_OP_GET_ROWS || before == GGML_OP_SUM_ROWS || before == GGML_OP_CLAMP
                       ? 0
                       : 1;
        case GGML_OP_SET_ROWS:       return before == GGML_OP_ROPE ? 0 : 1;
        case GGML_OP_FLASH_ATTN_EXT: return 2;
        default:                     return 1;
    }
}

static graph_price price_of(const ggml_cgraph * graph) {
    graph_price         p;
    const ggml_tensor * last = nullptr;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * t = graph->nodes[i];
        if (computes_nothing(t) || !(t->flags & GGML_TENSOR_FLAG_COMPUTE)) {
            continue;
        }
        p.n_kernels += kernels_of(t, last);
        last         = t;
        for (const bytes & weights : weights_of(t)) {
            p.bytes += weights.size;
        }
    }
    return p;
}

//
// routing
//

namespace {

// The routing of a model whose values are skipped: writes the routers' choices, their weights, and what a predictor
// would say of the next layers, to where a graph would have computed them.
//
// Thread-safety: none; one context.
class routing_script {
  public:
    // [n_rows][n_layers][n_used]; must outlive the script. Each token takes the next row, from the first one again
    // after the last.
    struct table {
        const int32_t * experts   = nullptr; // null: nothing is written
        const float *   weights   = nullptr;
        int64_t         n_rows    = 0;
        int64_t         n_layers  = 0;
        int64_t         n_used    = 0;
        int64_t         n_experts = 0;
    };

    void use(const table & t) {
        table_ = t;
        next_  = 0;
    }

    // The graph's nodes are computed now.
    void write(const ggml_cgraph * graph) {
        for (int i = 0; i < graph->n_nodes && table_.experts; i++) {
            write(graph->nodes[i]);
        }
    }

  private:
    // Shares of right guesses 1 to 4 layers ahead, as docs/results/method.md has them.
    static constexpr double accuracy[] = { 0.874, 0.832, 0.797, 0.771 };

    static int64_t layer_of(const ggml_tensor * t, const char * prefix) {
        const size_t length = std::strlen(prefix);
        int          layer  = -1;
        return std::strncmp(t->name, prefix, length) == 0 && std::sscanf(t->name + length, "%d", &layer) == 1 ? layer
                                                                                                              : -1;
    }

    template <typename T>
    T at(const T * values, int64_t row, int64_t layer, int64_t rank) const {
        return values[((row % table_.n_rows) * table_.n_layers + layer % table_.n_layers) * table_.n_used + rank];
    }

    template <typename T>
    static void put(ggml_tensor * t, int64_t column, int64_t row, T value) {
        std::memcpy(static_cast<char *>(t->data) + row * int64_t(t->nb[1]) + column * int64_t(t->nb[0]), &value,
                    sizeof(value));
    }

    void write(ggml_tensor * t) {
        const int64_t layer = layer_of(t, "ffn_moe_argsort-");
        if (layer >= 0) {
            first_ = layer == 0 ? next_ : first_;
            next_  = layer == 0 ? next_ + t->ne[1] : next_;
            layer_ = layer;
            for (int64_t i = 0; i < t->ne[1]; i++) {
                for (int64_t k = 0; k < table_.n_used; k++) {
                    put(t, k, i, at(table_.experts, next_ - t->ne[1] + i, layer, k));
                }
            }
        } else if (std::strncmp(t->name, "ffn_moe_weights", 15) == 0 && ggml_is_contiguous(t) &&
                   ggml_nelements(t) % table_.n_used == 0) {
            auto * values = static_cast<float *>(t->data);
            for (int64_t i = 0; i < ggml_nelements(t); i++) {
                values[i] = at(table_.weights, first_ + i / table_.n_used, layer_, i % table_.n_used);
            }
        } else if (t->op == GGML_OP_MUL_MAT && std::strncmp(t->src[0]->name, "leaf_", 5) == 0 &&
                   t->ne[0] % table_.n_experts == 0) { // all other weights have a name
            predict(t);
        }
    }

    // Outputs of stacked routers, of the running layer or the next: high ones for experts that they will choose, or, of
    // later layers, for others.
    void predict(ggml_tensor * t) {
        const ggml_tensor * routers = t->src[0]; // from a row of the stack on, which begins its buffer
        const auto          base    = static_cast<const char *>(ggml_backend_buffer_get_base(routers->buffer));
        const auto          row     = int64_t(size_t(static_cast<const char *>(routers->data) - base) / routers->nb[1]);
        for (int64_t i = 0; i < t->ne[1]; i++) {
            for (int64_t e = 0; e < t->ne[0]; e++) {
                put(t, e, i, 0.0f);
            }
            for (int64_t n = 0; n < t->ne[0] / table_.n_experts; n++) {
                const int64_t ahead = row / table_.n_experts + n - layer_;
                for (int64_t k = 0; k < table_.n_used; k++) {
                    const bool is_right = ahead == 0 || chance_(random_) < accuracy[std::min<int64_t>(ahead, 4) - 1];
                    const auto any      = int64_t(chance_(random_) * double(table_.n_experts));
                    const auto chosen   = int64_t(at(table_.experts, first_ + i, layer_ + ahead, k));
                    put(t, n * table_.n_experts + (is_right ? chosen : any), i, float(2 * table_.n_used - k));
                }
            }
        }
    }

    table                                  table_;
    int64_t                                next_  = 0; // row of the next token
    int64_t                                first_ = 0; // row of the running tokens
    int64_t                                layer_ = 0; // the running one
    std::mt19937                           random_{ 1 };
    std::uniform_real_distribution<double> chance_{ 0, 1 };
};

routing_script & script() {
    static routing_script one;
    return one;
}

//
// the face
//

// CUDA captures a graph that comes again as it was, and replays it as long as it does.
class graph_memory {
  public:
    virtual_clock::start start_of(const ggml_cgraph * graph) {
        known &        it     = graphs_[graph->nodes[0]];
        const uint64_t before = std::exchange(it.hash, hash_of(graph));
        if (before != it.hash || host_threads::clock().price().captures == 0) {
            it.is_captured = false;
            return virtual_clock::start::direct;
        }
        return std::exchange(it.is_captured, true) ? virtual_clock::start::replay : virtual_clock::start::capture;
    }

  private:
    struct known {
        uint64_t hash        = 0;
        bool     is_captured = false;
    };

    static void add(uint64_t & hash, const void * at, size_t size) {
        hash = 31 * hash + std::hash<std::string_view>()({ static_cast<const char *>(at), size });
    }

    static uint64_t hash_of(const ggml_cgraph * graph) {
        uint64_t hash = 0;
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
    void on_copy(const copy & what) override {
        if (what.way == direction::to_device && !what.is_pinned && what.source.size >= 1 << 20) { // a model's weights
            use_mapped(now(), what.source);
        }
        if (what.way == direction::on_device) {
            clock_.compute(now(), streams_[what.stream].queue, virtual_clock::start::direct, 1,
                           device_time(1, 2 * what.source.size));
            return;
        }
        const resource link = what.way == direction::to_device ? resource::to_device : resource::to_host;
        if (what.stream == NO_STREAM) {
            clock_.copy_and_wait(now(), link, what.source.size, what.is_pinned);
        } else {
            clock_.copy(now(), streams_[what.stream].queue, link, what.source.size, what.is_pinned);
        }
    }

    void on_compute(int stream, ggml_cgraph * graph) override {
        script().write(graph);
        const graph_price p = price_of(graph);
        if (p.n_kernels > 0) {
            own & s = streams_[stream];
            clock_.compute(now(), s.queue, s.graphs.start_of(graph), p.n_kernels, device_time(p.n_kernels, p.bytes));
        }
    }

    void on_synchronize(int stream) override { clock_.synchronize(now(), streams_[stream].queue); }

    void on_event_synchronize(int event) override { clock_.synchronize(now(), { events_[event] }); }

    void on_record(int event, int stream) override { events_[event] = clock_.record(now(), streams_[stream].queue); }

    void on_wait(int event, int stream) override { clock_.let_wait(now(), streams_[stream].queue, events_[event]); }

    std::string report() override {
        const costs &                          c     = clock_.sums();
        const std::pair<const char *, int64_t> all[] = {
            { "now", now() },
            { "launches", c.launches },
            { "replays", c.replays },
            { "waits", c.waits },
            { "copies", c.copies },
            { "reads", c.reads },
            { "copied_bytes", c.copied_bytes },
            { "device", busy({ resource::device }) },
            { "link", busy({ resource::to_device }) },
            { "cpu", busy({ resource::cpu }) },
            { "any", busy({ resource::device, resource::to_device, resource::cpu, resource::disk }) },
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
    int64_t busy(std::initializer_list<resource> any) const { return clock_.busy(0, now(), any); }

    virtual_clock &     clock_ = host_threads::clock();
    std::map<int, own>  streams_;
    std::map<int, ns_t> events_;
};

} // namespace

std::unique_ptr<device_observer> modelled::make_face() {
    return std::make_unique<time_face>();
}

extern "C" {
// The CPU backend's: its cores take the time in which they read the weights.
MODELLED_API ggml_status ggml_graph_compute(ggml_cgraph * graph, ggml_cplan *) {
    uint64_t n_nodes = 0;
    uint64_t bytes   = 0;
    script().write(graph);
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * t  = graph->nodes[i];
        n_nodes               += !computes_nothing(t);
        for (const modelled::bytes & weights : weights_of(t)) {
            bytes += weights.size;
            if (t->src[0]->buffer && std::strcmp(ggml_backend_buffer_name(t->src[0]->buffer), "CPU_Mapped") == 0) {
                use_mapped(now(), weights);
            }
        }
    }
    if (bytes > 0) {
        host_threads::clock().compute_on_cpu(now(), n_nodes, bytes);
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
}
