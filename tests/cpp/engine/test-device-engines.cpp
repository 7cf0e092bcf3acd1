// SPDX-License-Identifier: MIT
//
// A model on two devices with memory of their own, through hobbit.h and ggml's registry.
#include "backend/ggml-hobbit.h"
#include "fixtures/layer-graph.h"
#include "fixtures/model-fixture.h"
#include "fixtures/numbers.h"
#include "fixtures/rpc-device.h"

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

static ggml_backend_dev_t second_device() {
    static ggml_backend_dev_t started = start_rpc_device();
    return started;
}

static const std::string & both() {
    static const std::string names =
        ggml_backend_dev_name(rpc_device()) + std::string(",") + ggml_backend_dev_name(second_device());
    return names;
}

// Waits for what happens in the background.
static bool becomes(const std::function<bool()> & is_so) {
    for (int n = 0; n < 12000 && !is_so(); n++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return is_so();
}

// Allocates the pools.
static void prepare(const model_ptr & model) {
    context_of(model, 3);
}

static bool set_thresholds(hobbit_model * model, double t1, double t2) {
    const hobbit_setting changes[] = { number("hobbit.t1", t1), number("hobbit.t2", t2) };
    return hobbit_change_settings(model, changes, 2, nullptr, 0);
}

static hobbit_device_info device_of(const model_ptr & model, size_t i) {
    hobbit_device_info info;
    REQUIRE(hobbit_get_device(model.get(), i, &info));
    return info;
}

static uint64_t counter_of(const model_ptr & model, const char * name) {
    return uint64_t(counters_of(model.get()).at(name));
}

// Rows of the block's layer, computed by the backend of its device.
static rows compute(const model_ptr & model, const layer_input & input, int32_t block) {
    ggml_backend_buffer_type_t experts = hobbit_buffer_type(model.get(), block);
    const compute_backend      backend(ggml_backend_buft_get_device(experts));
    layer_graph                graph(moe_model(), input, false, hobbit_device_buffer_type(model.get(), block));
    graph.set_in_buffer(experts, uint32_t(block));
    CHECK(ggml_backend_graph_compute(backend.backend, graph.graph) == GGML_STATUS_SUCCESS);
    return graph.output();
}

// The rows of a graph with plain tensors.
static rows stock(const files & f, const layer_input & input, uint32_t block) {
    const moe_model shape;
    cpu_backend     cpu;
    layer_graph     plain(shape, input);
    plain.set_plain([&](const std::string & part) {
        return plain_weight{ shape.high, f.plain.data(moe_model::name(block, part)) };
    });
    REQUIRE(ggml_backend_graph_compute(cpu.backend, plain.graph) == GGML_STATUS_SUCCESS);
    return plain.output();
}

TEST_CASE("each device computes the layers that it is given, with pools of its own") {
    const files       f;
    const layer_input input = random_input(moe_model(), 3, 41);
    for (const char * mode : { "gpu", "auto" }) {
        const std::string how = mode;
        const model_ptr   model =
            opened(f.plain_path,
                   { number("hobbit.pools", 1 << 20), text("hobbit.device", both()), text("hobbit.mode", how) },
                   { second_device(), rpc_device() });
        CHECK(device_of(model, 0).pool_slots_high == 0);
        prepare(model);

        const auto uploads_to = [&](size_t i) {
            return becomes([&] { return device_of(model, i).bytes_transferred > 0; });
        };
        CHECK(compute(model, input, 0) == stock(f, input, 0));
        CHECK(uploads_to(1));
        CHECK(device_of(model, 0).bytes_transferred == 0);
        CHECK(compute(model, input, 1) == stock(f, input, 1));
        CHECK(uploads_to(0));
        const auto by_device = [&] {
            return device_of(model, 0).bytes_transferred + device_of(model, 1).bytes_transferred;
        };
        CHECK(becomes([&] { return by_device() == counter_of(model, "bytes_transferred"); }));
        CHECK(counter_of(model, "layers_computed") == 2);
    }
}

TEST_CASE("without hobbit.device the experts of a layer are where the rest of it is") {
    const files              f;
    const layer_input        input = random_input(moe_model(), 3, 47);
    const ggml_backend_dev_t cpu   = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const ggml_backend_dev_t rpc   = rpc_device();
    const struct {
        std::vector<ggml_backend_dev_t> layers;
        std::vector<ggml_backend_dev_t> devices;
    } cases[] = {
        { { second_device(), rpc }, { second_device(), rpc } },
        { { rpc, rpc }, { rpc } },
        { { cpu, rpc }, { rpc } }, // the CPU is no place where another device is
        { { cpu, cpu }, { cpu } },
        { { nullptr, nullptr }, { cpu } },
        { {}, { cpu } },
    };
    for (const auto & c : cases) {
        const model_ptr model = opened(f.plain_path, { number("hobbit.pools", 1 << 20) }, c.layers);
        prepare(model);
        uint32_t           n_layers = 0;
        hobbit_device_info here;
        for (size_t i = 0; i < c.devices.size(); i++) {
            here      = device_of(model, i);
            n_layers += here.n_layers;
            CHECK(here.name == std::string(ggml_backend_dev_name(c.devices[i])));
        }
        CHECK_FALSE(hobbit_get_device(model.get(), c.devices.size(), &here));
        CHECK(n_layers == 2);
        for (const int32_t block : { 0, 1 }) {
            CHECK(compute(model, input, block) == stock(f, input, uint32_t(block)));
        }
    }
}

TEST_CASE("what a device is bounded by wants one with memory of its own, which the layers may be on") {
    const files       f;
    const std::string mode = "gpu";
    const struct {
        std::vector<hobbit_setting> settings;
        std::string                 refused;
    } cases[] = {
        { { number("hobbit.device_memory", 64 << 20) }, "name a GPU with hobbit.device" },
        { { text("hobbit.mode", mode) }, "name a GPU with hobbit.device" },
        { { number("hobbit.memory", 1 << 30), number("hobbit.pools", 1 << 20) }, "give one of them" },
    };
    for (const auto & c : cases) {
        const model_ptr on_cpu = opened(f.plain_path, c.settings);
        CHECK(refused_context(on_cpu).find(c.refused) != std::string::npos);

        const model_ptr apart = opened(f.plain_path, c.settings, { rpc_device(), rpc_device() });
        prepare(apart);
        CHECK(device_of(apart, 0).name == std::string(ggml_backend_dev_name(rpc_device())));
    }
}

TEST_CASE("what is told of the devices, and their sum") {
    const files     f;
    const model_ptr model = opened(f.plain_path, { number("hobbit.pools", 1 << 20), text("hobbit.device", both()) },
                                   { second_device(), rpc_device() });
    prepare(model);
    hobbit_info info;
    hobbit_get_info(model.get(), &info);
    CHECK(info.on_device);
    CHECK(info.pool_slots_high == 8);
    CHECK(info.host_slots_high == 8);
    for (size_t i = 0; i < 2; i++) {
        const hobbit_device_info here = device_of(model, i);
        CHECK(here.name == std::string(ggml_backend_dev_name(i == 0 ? rpc_device() : second_device())));
        CHECK(here.n_layers == 1);
        CHECK(here.pool_slots_high == 4);
        CHECK(here.pool_slots_low == 0);
        CHECK(here.pool_bytes_high == info.pool_bytes_high / 2);
    }
    hobbit_device_info none;
    CHECK_FALSE(hobbit_get_device(model.get(), 2, &none));

    // llama.cpp tells them apart by these
    const auto name = [&](int32_t block) {
        return std::string(ggml_backend_buft_name(hobbit_buffer_type(model.get(), block)));
    };
    CHECK(name(0) != name(1));
    CHECK(name(0) != ggml_backend_buft_name(hobbit_device_buffer_type(model.get(), 0)));
    CHECK(name(-1).find("DISK_HOBBIT") == 0);
}

TEST_CASE("the CPU alone is one device, with all layers") {
    const files     f;
    const model_ptr model = opened(f.plain_path, { number("hobbit.pools", 1 << 20) });
    prepare(model);
    CHECK(device_of(model, 0).name == std::string("CPU"));
    CHECK(device_of(model, 0).n_layers == 2);
    CHECK(device_of(model, 0).pool_slots_high == 8);
    CHECK(device_of(model, 0).bytes_transferred == 0);
    hobbit_device_info none;
    CHECK_FALSE(hobbit_get_device(model.get(), 1, &none));
}

TEST_CASE("layers of which llama.cpp has the rest elsewhere are spread over the devices") {
    const files              f;
    const ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    for (const auto & devices : { std::vector<ggml_backend_dev_t>{}, { cpu, cpu } }) {
        const model_ptr model =
            opened(f.plain_path, { number("hobbit.pools", 1 << 20), text("hobbit.device", both()) }, devices);
        CHECK(device_of(model, 0).n_layers == 1);
        CHECK(device_of(model, 1).n_layers == 1);
    }
}

TEST_CASE("before the layers are placed no device is known, and what is told is kept") {
    const files     f;
    const model_ptr model =
        opened_file(f.tiers_path, { number("hobbit.pools", 1 << 20), text("hobbit.device", both()) });
    hobbit_info info;
    hobbit_get_info(model.get(), &info);
    CHECK(info.n_layers == 2);
    CHECK_FALSE(info.on_device);
    hobbit_device_info none;
    CHECK_FALSE(hobbit_get_device(model.get(), 0, &none));
    CHECK(set_thresholds(model.get(), 0.0, 1.0));
    CHECK(hobbit_place_layers(model.get(), nullptr, 0, true, nullptr, 0));
    prepare(model);
    compute(model, random_input(moe_model(), 3, 59), 0);
    CHECK(counter_of(model, "selections_low") > 0);
}

TEST_CASE("a device without layers holds nothing, and the others have all of the pools") {
    const files       f;
    const layer_input input = random_input(moe_model(), 3, 43);
    const model_ptr   model = opened(f.plain_path, { number("hobbit.pools", 1 << 20), text("hobbit.device", both()) },
                                     { second_device(), second_device() });
    prepare(model);
    CHECK(device_of(model, 0).n_layers == 0);
    CHECK(device_of(model, 0).pool_slots_high == 0);
    CHECK(device_of(model, 1).pool_slots_high == 8);
    for (const int32_t block : { 0, 1 }) {
        CHECK(compute(model, input, block) == stock(f, input, uint32_t(block)));
    }
    CHECK(device_of(model, 0).bytes_transferred == 0);
}

TEST_CASE("pools are of all devices together: too small ones are an error that names the smallest sum that works") {
    const files     f;
    const model_ptr model = opened(f.plain_path, { number("hobbit.pools", 1000), text("hobbit.device", both()) });
    const int64_t   named = smallest_pools_named(model);
    const model_ptr again = opened(f.plain_path, { number("hobbit.pools", named), text("hobbit.device", both()) });
    prepare(again);
    for (size_t i = 0; i < 2; i++) {
        CHECK(device_of(again, i).pool_slots_high == 2);
        CHECK(2 * device_of(again, i).pool_bytes_high == uint64_t(named));
    }
}

// Uses of four experts in each of the two layers; layer 1's are used more.
static void calibrate(const files & f) {
    gguf_builder calibration;
    gguf_set_val_u64(calibration.keys(), "hobbit.model_bytes", std::filesystem::file_size(f.plain_path));
    calibration.set_ints("hobbit.expert_uses", { 0, 5, 2, 1, 8, 7, 6, 9 });
    calibration.write(f.dir.path("plain.calibration.gguf"));
}

TEST_CASE("each device is filled with the most used experts of its own layers") {
    const files f;
    calibrate(f);
    const int64_t   slot  = 3 * 64 * 32 * 2;
    const model_ptr model = opened(f.plain_path, { number("hobbit.pools", 4 * slot), text("hobbit.device", both()) });
    prepare(model);
    const auto is_full = [&](size_t i) { return device_of(model, i).bytes_transferred == uint64_t(2 * slot); };
    CHECK(becomes([&] { return is_full(0) && is_full(1); }));

    const std::vector<int32_t> most_used[] = { { 1, 2 }, { 3, 0 } };
    for (const int32_t block : { 0, 1 }) {
        layer_input input = random_input(moe_model(), 1, 53);
        input.ids         = most_used[block];
        CHECK(compute(model, input, block) == stock(f, input, uint32_t(block)));
    }
    CHECK(counter_of(model, "hits_high") == 4);
    CHECK(counter_of(model, "misses_high") == 0);
}

// Asked before each expert that the first computation waits for; the next one waits for the others.
TEST_CASE("an abort ends the wait for the filling, and nothing is lost") {
    const files f;
    calibrate(f);
    const int64_t   slot  = 3 * 64 * 32 * 2;
    const model_ptr model = opened(f.plain_path, { number("hobbit.pools", 4 * slot), text("hobbit.device", both()) });
    prepare(model);
    const layer_input          input   = random_input(moe_model(), 1, 53);
    ggml_backend_buffer_type_t experts = hobbit_buffer_type(model.get(), 0);
    ggml_backend_dev_t         device  = ggml_backend_buft_get_device(experts);
    const compute_backend      backend(device);
    layer_graph                graph(moe_model(), input, false, hobbit_device_buffer_type(model.get(), 0));
    graph.set_in_buffer(experts, 0);
    const auto set_abort =
        (ggml_backend_set_abort_callback_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device),
                                                                              "ggml_backend_set_abort_callback");
    int n_asked = 0;
    set_abort(backend.backend, [](void * n) { return ++*static_cast<int *>(n) == 2; }, &n_asked);
    CHECK(ggml_backend_graph_compute(backend.backend, graph.graph) == GGML_STATUS_ABORTED);
    CHECK(n_asked == 2);
    CHECK(counter_of(model, "layers_computed") == 0);
    CHECK(compute(model, input, 0) == stock(f, input, 0)); // by a backend that nobody aborts
    for (size_t i = 0; i < 2; i++) {
        CHECK(device_of(model, i).bytes_transferred >= uint64_t(2 * slot));
    }
}

TEST_CASE("thresholds reach all devices") {
    const files          f;
    const layer_input    input  = random_input(moe_model(), 3, 47);
    const hobbit_setting strict = { "hobbit.strict", 1.0, nullptr }; // whatever is there
    const model_ptr      model  = opened(f.tiers_path, { number("hobbit.pools", 1 << 20), text("hobbit.device", both()),
                                                         number("hobbit.t1", 0.0), number("hobbit.t2", 1.0), strict });
    prepare(model);
    uint64_t n_low = 0;
    for (const int32_t block : { 0, 1 }) {
        compute(model, input, block);
        CHECK(counter_of(model, "selections_low") > n_low);
        n_low = counter_of(model, "selections_low");
    }
    CHECK(set_thresholds(model.get(), 1.0, 1.0));
    for (const int32_t block : { 0, 1 }) {
        compute(model, input, block);
        CHECK(counter_of(model, "selections_low") == n_low);
    }
    const hobbit_setting none    = number("hobbit.t2", 0.0);
    const context_ptr    context = context_of(model, 3);
    CHECK(hobbit_change_sequence_settings(context.get(), 0, &none, 1, nullptr, 0));
    CHECK(number(hobbit::rule_numbers(hobbit_sequence_precision(context.get(), 0)), "t1") == 0.0);
    CHECK(number(hobbit::rule_numbers(hobbit_sequence_precision(context.get(), 1)), "t1") == 1.0);
    for (const int32_t block : { 0, 1 }) {
        const uint64_t before = counter_of(model, "selections_skipped");
        compute(model, input, block);
        CHECK(counter_of(model, "selections_skipped") > before);
    }
}

TEST_CASE("the devices of the backend may be listed while another one is registered") {
    const ggml_backend_dev_t first    = ggml_backend_hobbit_register(rpc_device());
    const ggml_backend_dev_t further  = start_rpc_device();
    ggml_backend_reg_t       registry = ggml_backend_dev_backend_reg(first);
    const size_t             n_before = ggml_backend_reg_dev_count(registry);
    std::atomic<bool>        is_over{ false };
    std::thread              lister([&] {
        while (!is_over) {
            for (size_t i = 0; i < ggml_backend_reg_dev_count(registry); i++) {
                CHECK(ggml_backend_dev_name(ggml_backend_reg_dev_get(registry, i)) != std::string());
            }
        }
    });
    CHECK(ggml_backend_hobbit_register(further) != first);
    CHECK(ggml_backend_hobbit_register(rpc_device()) == first);
    is_over = true;
    lister.join();
    CHECK(ggml_backend_reg_dev_count(registry) == n_before + 1);
}
