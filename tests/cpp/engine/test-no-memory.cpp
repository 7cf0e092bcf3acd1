// SPDX-License-Identifier: MIT
//
// Memory that runs out at any allocation is an error, and another model then computes the same as ever.
#include "fixtures/layer-graph.h"
#include "fixtures/model-fixture.h"
#include "ggml-cpp.h"
#include "hobbit.h"

#include <atomic>
#include <cstdlib>
#include <doctest/doctest.h>
#include <functional>
#include <new>
#include <string>
#include <vector>

// Allocations until one fails, of all threads; negative: none fails.
static std::atomic<int64_t> g_left{ -1 };
static std::atomic<bool>    g_lasts{ false }; // all later ones fail as well
static std::atomic<int64_t> g_n_failed{ 0 };

static bool fails() {
    int64_t left = g_left;
    do {
        if (left < 0) {
            return false;
        }
    } while (!g_left.compare_exchange_weak(left, left > 0 || !g_lasts ? left - 1 : 0));
    if (left > 0) {
        return false;
    }
    g_n_failed++;
    return true;
}

static void * allocate(size_t size, size_t alignment) {
    void * p = nullptr;
    if (fails() || posix_memalign(&p, alignment, size) != 0) {
        throw std::bad_alloc();
    }
    return p;
}

void * operator new(size_t size) {
    return allocate(size, alignof(std::max_align_t));
}

void * operator new(size_t size, std::align_val_t alignment) {
    return allocate(size, size_t(alignment));
}

// ggml's work memory alone is an array of bytes: it would be freed twice where it cannot be had
void * operator new[](size_t size) {
    void * p = malloc(size);
    return p ? p : throw std::bad_alloc();
}

void operator delete[](void * p) noexcept {
    free(p);
}

void operator delete[](void * p, size_t) noexcept {
    free(p);
}

// as the standard library's, but for the sanitizers, which have their own
void * operator new(size_t size, const std::nothrow_t &) noexcept {
    void * p = nullptr;
    return fails() || posix_memalign(&p, alignof(std::max_align_t), size) != 0 ? nullptr : p;
}

void operator delete(void * p) noexcept {
    free(p);
}

void operator delete(void * p, size_t) noexcept {
    free(p);
}

void operator delete(void * p, std::align_val_t) noexcept {
    free(p);
}

void operator delete(void * p, size_t, std::align_val_t) noexcept {
    free(p);
}

// Returns true if an allocation failed while the action ran.
static bool run_failing(int64_t n, bool lasts, const std::function<void()> & action) {
    g_lasts    = lasts;
    g_n_failed = 0;
    g_left     = n;
    action();
    g_left = -1;
    return g_n_failed > 0;
}

namespace {

struct computation {
    model_ptr           model;
    context_ptr         context;
    layer_graph         graph;
    ggml_backend_ptr    backend;
    const layer_input & input;

    computation(const std::string & path, const moe_model & shape, const layer_input & in) :
        model(opened(path, { number("hobbit.pools", 100 << 10), number("hobbit.t1", 0.6) })),
        context(context_of(model, 3)),
        graph(shape, in),
        input(in) {
        graph.set_in_buffer(hobbit_buffer_type(model.get(), 0));
        backend.reset(ggml_backend_init_by_name("HOBBIT", nullptr));
        REQUIRE(backend);
    }

    ggml_status compute() {
        const int32_t sequences[] = { 0, 0, 0 };
        const int32_t positions[] = { 0, 1, 2 };
        const int8_t  outputs[]   = { 0, 0, 1 };
        hobbit_begin_batch(context.get(), 3, sequences, positions, outputs, true);
        const ggml_status result = ggml_backend_graph_compute(backend.get(), graph.graph);
        hobbit_end_batch(context.get());
        return result;
    }
};

} // namespace

static void log_nothing(ggml_log_level, const char *, void *) {}

TEST_CASE("memory that runs out while a layer is computed") {
    ggml_log_set(log_nothing, nullptr);
    const files       f;
    const moe_model   shape;
    const layer_input input = random_input(shape, 3, 41);
    computation       right(f.tiers_path, shape, input);
    REQUIRE(right.compute() == GGML_STATUS_SUCCESS);

    for (const bool lasts : { false, true }) {
        CAPTURE(lasts);
        int64_t n_errors = 0;
        for (int64_t n = 0;; n++) {
            CAPTURE(n);
            computation c(f.tiers_path, shape, input);
            ggml_status result = GGML_STATUS_SUCCESS;
            if (!run_failing(n, lasts, [&] { result = c.compute(); })) {
                CHECK(result == GGML_STATUS_SUCCESS);
                break;
            }
            if (result == GGML_STATUS_SUCCESS) { // the result does not need the failed allocation
                CHECK(c.graph.output() == right.graph.output());
                continue;
            }
            n_errors++;
            char       err[512] = "";
            const bool goes_on  = hobbit_check(c.model.get(), err, sizeof(err)); // it failed before it began
            CHECK((goes_on || std::string(err).find("memory") != std::string::npos));
            CHECK((c.compute() == GGML_STATUS_SUCCESS) == goes_on);
            CHECK((!goes_on || c.graph.output() == right.graph.output()));
            computation other(f.tiers_path, shape, input);
            CHECK(other.compute() == GGML_STATUS_SUCCESS);
            CHECK(other.graph.output() == right.graph.output());
        }
        MESSAGE(n_errors << " errors");
        CHECK(n_errors > 50);
    }
    ggml_log_set(nullptr, nullptr);
}

TEST_CASE("memory that runs out while a model is opened and prepared") {
    ggml_log_set(log_nothing, nullptr);
    const files f;
    for (const bool lasts : { false, true }) {
        CAPTURE(lasts);
        const hobbit_setting pools    = number("hobbit.pools", 90 << 10);
        int64_t              n_errors = 0;
        for (int64_t n = 0;; n++) {
            CAPTURE(n);
            char              err[512] = "";
            hobbit_model *    model    = nullptr;
            hobbit_context *  context  = nullptr;
            bool              ok       = false;
            const bool        failed   = run_failing(n, lasts, [&] {
                ok = hobbit_open(f.tiers_path.c_str(), &pools, 1, &model, err, sizeof(err)) &&
                     hobbit_place_layers(model, nullptr, 0, true, err, sizeof(err)) &&
                     hobbit_open_context(model, 0, 3, &context, err, sizeof(err));
            });
            const model_ptr   owned(model);
            const context_ptr owned_context(context);
            if (!ok) {
                n_errors++;
                CHECK(std::string(err) != "");
            }
            if (!failed) {
                CHECK(ok);
                break;
            }
        }
        MESSAGE(n_errors << " errors");
        CHECK(n_errors > 50);
    }
    ggml_log_set(nullptr, nullptr);
}
