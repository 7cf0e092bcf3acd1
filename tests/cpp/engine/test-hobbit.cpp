// SPDX-License-Identifier: MIT
#include "hobbit.h"

#include "fixtures/fake-machine.h"
#include "fixtures/layer-graph.h"
#include "fixtures/model-fixture.h"
#include "ggml-cpp.h"

#include <doctest/doctest.h>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

static const hobbit_setting ENABLE   = { "hobbit.enable", 1.0, nullptr };
static const hobbit_setting UNPACKED = { "hobbit.pack", 0.0, nullptr }; // no staging memory

static std::string last_error() {
    char         err[512];
    const size_t length = hobbit_last_error(err, sizeof(err));
    CHECK(length == strlen(err));
    return err;
}

//
// opening
//

TEST_CASE("a dense model is none of ours, asked for or not") {
    const files f;
    CHECK_FALSE(opened(f.dense_path, {}));
    CHECK_FALSE(opened(f.dense_path, { ENABLE }));
}

TEST_CASE("a plain model that fits into memory is ours only where asked for") {
    const files f;
    CHECK_FALSE(opened(f.plain_path, {}));
    CHECK(opened(f.plain_path, { ENABLE }));
    CHECK(opened(f.plain_path, { number("hobbit.pools", 1 << 20) }));
    const std::string trace = f.dir.path("t.csv");
    CHECK(opened(f.plain_path, { text("hobbit.trace", trace) }));
}

TEST_CASE("a plain model is ours by itself where it does not fit into memory, with a tenth to spare") {
    const files    f;
    const uint64_t size = std::filesystem::file_size(f.plain_path);
    {
        const fake_machine small(size);
        CHECK(opened(f.plain_path, {}));
        CHECK_FALSE(opened(f.dense_path, {}));
    }
    {
        const fake_machine large(size + size / 10 + 2048);
        CHECK_FALSE(opened(f.plain_path, {}));
        large.write("proc/self/cgroup", "0::/a\n");
        large.write("sys/fs/cgroup/a/memory.max", std::to_string(size));
        large.write("sys/fs/cgroup/a/memory.current", "0\n");
        CHECK(opened(f.plain_path, {}));
    }
}

TEST_CASE("without a bound the pools take what is free, less a tenth or 256 MiB") {
    const files      f;
    char             err[512] = "";
    hobbit_pool_plan plan;
    const model_ptr  any = opened(f.plain_path, { number("hobbit.pools", 1 << 20) });
    REQUIRE_MESSAGE(hobbit_plan_pools(any.get(), 0, 32, &plan, err, sizeof(err)), err);

    const uint64_t     room = 60 << 10; // room for 60 of 96 KiB of experts
    const fake_machine machine((256 << 20) + plan.batch_bytes + room + 1023);
    const model_ptr    model = opened(f.plain_path, { ENABLE, UNPACKED });
    context_of(model, 32);
    hobbit_info info;
    hobbit_get_info(model.get(), &info);
    const uint64_t slot = info.pool_bytes_high / info.pool_slots_high;
    CHECK(info.pool_bytes_high <= room + 1024);
    CHECK(info.pool_bytes_high + slot > room);
}

TEST_CASE("a model with tiers is always ours") {
    const files f;
    CHECK(opened(f.tiers_path, {}));
}

TEST_CASE("errors are told to the caller and kept") {
    const files f;
    hobbit_clear_last_error();
    CHECK(last_error().empty());
    const std::string missing = f.dir.path("nowhere.gguf");
    const std::string message = refused(missing, {});
    CHECK(message.find("cannot open '" + missing + "'") == 0);
    CHECK(last_error() == message);

    CHECK(refused(f.tiers_path, { number("hobbit.t9", 1) }) == "unknown setting hobbit.t9");
    CHECK(last_error() == "unknown setting hobbit.t9");
    CHECK(opened(f.tiers_path, {}));
    CHECK(last_error() == "unknown setting hobbit.t9"); // a success does not take it back
    hobbit_clear_last_error();
    CHECK(last_error().empty());
}

TEST_CASE("a setting without a key or without its text is refused") {
    const files f;
    CHECK(refused(f.tiers_path, { { nullptr, 1.0, nullptr } }) == "a setting has no key: give one");
    CHECK(refused(f.tiers_path, { { "hobbit.trace", 0.0, nullptr } }) == "hobbit.trace takes a text");
}

TEST_CASE("a device that is not there is refused, with what to do") {
    const files       f;
    const std::string message = refused(f.tiers_path, { text("hobbit.device", "CUDA7") });
    const std::string no_gpu  = "there is no device 'CUDA7', and no other GPU: a driver and make install GPU=vulkan "
                                "find one";
    const std::string others  = "there is no device 'CUDA7': choose one of CPU"; // on a machine with a GPU
    CHECK((message == no_gpu || message.find(others) == 0));
    CHECK(opened(f.tiers_path, { text("hobbit.device", "cpu") }));
}

TEST_CASE("a bound on memory has room for one context at a time") {
    const files    f;
    const uint64_t beside = 1 << 20;
    std::string    reason;
    const auto     open_one = [&](const model_ptr & model, uint64_t bytes) {
        return context_of(model.get(), bytes, 32, reason);
    };
    const model_ptr bounded = opened(f.tiers_path, { number("hobbit.memory", int64_t(1) << 30) });
    context_ptr     first   = open_one(bounded, beside);
    REQUIRE_MESSAGE(first, reason);
    CHECK_FALSE(open_one(bounded, beside));
    CHECK(reason.find("has no room for a second one: give hobbit.pools in its place") != std::string::npos);
    first.reset();
    CHECK_FALSE(open_one(bounded, beside + 1));
    CHECK(reason.find("no room for a larger one") != std::string::npos);
    first = open_one(bounded, beside);
    CHECK_MESSAGE(first, reason);
    CHECK_FALSE(open_one(bounded, beside));

    const model_ptr   room   = opened(f.tiers_path, { number("hobbit.memory", int64_t(1) << 30),
                                                      number("hobbit.further", 2 * int64_t(beside)) });
    const context_ptr larger = open_one(room, beside);
    REQUIRE_MESSAGE(larger, reason);
    CHECK_MESSAGE(open_one(room, 2 * beside), reason);

    const model_ptr   pools = opened(f.tiers_path, { number("hobbit.pools", 1 << 20) });
    const context_ptr small = open_one(pools, beside);
    REQUIRE_MESSAGE(small, reason);
    CHECK_MESSAGE(open_one(pools, 2 * beside), reason);
}

TEST_CASE("messages are cut to the room given") {
    const files          f;
    char                 err[12] = "xxxxxxxxxxx";
    const hobbit_setting unknown = number("hobbit.t9", 1);
    hobbit_model *       model   = nullptr;
    CHECK_FALSE(hobbit_open(f.tiers_path.c_str(), &unknown, 1, &model, err, 8));
    CHECK(std::string(err) == "unknown");
    CHECK(err[8] == 'x');
    CHECK_FALSE(hobbit_open(f.tiers_path.c_str(), &unknown, 1, &model, nullptr, 0));
    CHECK(hobbit_last_error(err, 4) == strlen("unknown setting hobbit.t9")); // the length of all of it
    CHECK(std::string(err) == "unk");
}

TEST_CASE("low precision asked of a model that has none is an error, skipping is not") {
    const files f;
    CHECK(refused(f.plain_path, { number("hobbit.t1", 0.5) }).find("t1 = 0.5 asks for low-precision experts") == 0);
    CHECK(opened(f.plain_path, { number("hobbit.t1", 0.5), number("hobbit.t2", 0.5) }));
}

//
// references
//

TEST_CASE("a model lives as long as it is referenced") {
    const files f;
    model_ptr   first = opened(f.tiers_path, {});
    hobbit_ref(first.get());
    const model_ptr second(first.get());
    first.reset();
    CHECK(hobbit_check(second.get(), nullptr, 0));
    hobbit_unref(nullptr);
}

//
// for the model loader
//

TEST_CASE("experts are owned, the rest is not") {
    const files     f;
    const model_ptr model = opened(f.tiers_path, {});
    CHECK(hobbit_owns_tensor(model.get(), "blk.1.ffn_down_exps.weight"));
    CHECK_FALSE(hobbit_owns_tensor(model.get(), "blk.2.ffn_down_exps.weight"));
    CHECK_FALSE(hobbit_owns_tensor(model.get(), "blk.1.ffn_down_exps.low.0.weight"));
    CHECK_FALSE(hobbit_owns_tensor(model.get(), "token_embd.weight"));
    CHECK(hobbit_is_tier_tensor("blk.1.ffn_down_exps.low.0.weight"));
    CHECK_FALSE(hobbit_is_tier_tensor("blk.1.ffn_down_exps.weight"));
}

TEST_CASE("a large token embedding stays on disk where memory is short") {
    temp_dir        dir;
    gguf_builder    file;
    const moe_model shape;
    shape.add_high(file);
    file.add("token_embd.weight", GGML_TYPE_F32, 64, 65536, 1);
    file.add("output.weight", GGML_TYPE_F16, 64, 32, 1);
    const std::string path  = file.write(dir.path("m.gguf"));
    const model_ptr   small = opened(path, { number("hobbit.memory", 4 << 20) });
    CHECK(hobbit_owns_tensor(small.get(), "token_embd.weight"));
    CHECK_FALSE(hobbit_owns_tensor(small.get(), "output.weight"));
    const model_ptr few = opened(path, { number("hobbit.pools", 90000) });
    CHECK(hobbit_owns_tensor(few.get(), "token_embd.weight"));
    for (const auto & enough : { number("hobbit.memory", 1 << 30), number("hobbit.pools", 100000) }) {
        const model_ptr large = opened(path, { enough });
        CHECK_FALSE(hobbit_owns_tensor(large.get(), "token_embd.weight"));
    }
}

TEST_CASE("what is known before and after the pools are allocated") {
    const files     f;
    const model_ptr model = opened(f.tiers_path, { number("hobbit.pools", 400 << 10), number("hobbit.t1", 0.5) });
    hobbit_info     info;
    hobbit_get_info(model.get(), &info);
    CHECK(info.n_layers == 2);
    CHECK(info.n_experts == 4);
    CHECK(info.n_experts_used == 2);
    CHECK(info.n_tiers == 2);
    CHECK(info.tier_bytes_high == 98304); // 2 layers x 4 experts x 3 parts x 64 x 32 x 2 bytes
    CHECK(info.tier_bytes_low == 27648);  // at 18 bytes for 32 weights
    CHECK(std::string(info.precision) == "t1 0.5, t2 1");
    CHECK(info.pool_bytes_high == 0);
    CHECK(info.pool_slots_low == 0);

    context_of(model, 32);
    hobbit_get_info(model.get(), &info);
    CHECK(info.pool_slots_high >= 2);
    CHECK(info.pool_slots_low >= 2);
    CHECK(info.pool_slots_high <= 8);
    CHECK(info.pool_bytes_high + info.pool_bytes_low <= 400 << 10);

    const uint32_t slots = info.pool_slots_high;
    std::string    reason;
    CHECK(context_of(model.get(), uint64_t(1) << 60, 1 << 20, reason)); // changes nothing
    hobbit_get_info(model.get(), &info);
    CHECK(info.pool_slots_high == slots);

    const auto stats = counters_of(model.get());
    CHECK(stats.at("bytes_read") == 0);
    CHECK(stats.at("layers_computed") == 0);
    CHECK(stats.at("stall_s") == 0.0);
}

static hobbit_pool_plan planned(const model_ptr & model, uint32_t n_batch) {
    char             err[512] = "";
    hobbit_pool_plan plan     = {};
    REQUIRE_MESSAGE(hobbit_plan_pools(model.get(), 0, n_batch, &plan, err, sizeof(err)), err);
    return plan;
}

TEST_CASE("a plan names the pools that are then allocated, and what a larger batch takes of them") {
    const files f;
    for (const int64_t pools : { 100 << 10, 1 << 20 }) {
        const model_ptr        model = opened(f.tiers_path, { number("hobbit.pools", pools) });
        const hobbit_pool_plan plan  = planned(model, 64);
        // rows of 64 inputs and 64 outputs
        CHECK(planned(model, 1064).batch_bytes - plan.batch_bytes == 1000 * (64 + 64) * 4);
        CHECK(planned(model, 1064).pool_bytes == plan.pool_bytes); // their size is given
        CHECK(planned(model, 64).shortage == HOBBIT_SHORT_OF_NOTHING);

        hobbit_info as_planned, info;
        hobbit_get_info(model.get(), &as_planned);
        CHECK(plan.pool_bytes == as_planned.pool_bytes_high + as_planned.pool_bytes_low);
        context_of(model, 64);
        hobbit_get_info(model.get(), &info);
        CHECK(as_planned.pool_bytes_high == info.pool_bytes_high);
        CHECK(as_planned.pool_slots_low == info.pool_slots_low);
        CHECK(plan.pool_bytes == info.pool_bytes_high + info.pool_bytes_low);
        CHECK(plan.holds_all == (pools == 1 << 20));
    }
    const model_ptr  model    = opened(f.tiers_path, { number("hobbit.memory", 200 << 20) });
    char             err[512] = "";
    hobbit_pool_plan unused   = {};
    CHECK(planned(model, 64).holds_all);
    CHECK_FALSE(hobbit_plan_pools(model.get(), 0, 1 << 20, &unused, err, sizeof(err)));
    CHECK(std::string(err).find("a memory budget of 200.0 MiB is too small") == 0);
    CHECK(unused.shortage == HOBBIT_SHORT_OF_MEMORY);
    const uint64_t least  = unused.least; // works with a margin of 2 MiB and 1 %
    const uint64_t growth = 8 << 20;      // the process grows meanwhile, as a sanitizer keeps what is freed
    for (const uint64_t bound : { least + growth, least - least / 50 - (4 << 20) }) {
        const model_ptr other = opened(f.tiers_path, { number("hobbit.memory", int64_t(bound)) });
        CHECK(hobbit_plan_pools(other.get(), 0, 1 << 20, &unused, err, sizeof(err)) == (bound > least));
    }
    CHECK(unused.least >= least);
    CHECK(unused.least < least + growth);
}

TEST_CASE("layers that are not run are told apart, and each layer's number of experts counts") {
    const files    f;
    char           err[512] = "";
    hobbit_model * model    = nullptr;
    REQUIRE_MESSAGE(hobbit_open(f.tiers_path.c_str(), nullptr, 0, &model, err, sizeof(err)), err);
    const uint32_t used[] = { 1, 2 };
    hobbit_set_experts_used(model, used, 2);
    hobbit_info info;
    hobbit_get_info(model, &info);
    CHECK(info.n_run_layers == 2);
    CHECK(info.n_all_experts == 8);
    CHECK(info.n_token_uses == 3);
    hobbit_set_run_blocks(model, 1); // the other one is a draft head that nobody loads
    hobbit_get_info(model, &info);
    CHECK(info.n_layers == 2);
    CHECK(info.n_experts_used == 2);
    CHECK(info.n_run_layers == 1);
    CHECK(info.n_all_experts == 4);
    CHECK(info.n_token_uses == 1);
    hobbit_unref(model);
}

TEST_CASE("counters are listed by name, those of one metric side by side, and are read in that order") {
    const files         f;
    const model_ptr     model = opened(f.tiers_path, { number("hobbit.pools", 400 << 10) });
    std::vector<double> values(1000, -1);
    hobbit_get_counters(model.get(), values.data(), values.size());
    std::set<std::string> names, metrics;
    std::string           previous;
    size_t                n = 0;
    for (; const hobbit_counter * counter = hobbit_counter_at(n); n++) {
        CAPTURE(counter->name);
        CHECK(names.insert(counter->name).second);
        CHECK(std::string(counter->help) != "");
        CHECK(values[n] == 0);
        CHECK((counter->metric == previous || metrics.insert(counter->metric).second));
        previous = counter->metric;
    }
    CHECK(names.count("hits_high") == 1);
    CHECK(names.count("stall_s") == 1);
    CHECK(values[n] == -1);
}

TEST_CASE("pools too small are an error of prepare that names what works") {
    const files     f;
    const model_ptr model = opened(f.tiers_path, { number("hobbit.pools", 1000) });
    const int64_t   named = smallest_pools_named(model);
    context_of(opened(f.tiers_path, { number("hobbit.pools", named) }), 1);
}

TEST_CASE("a trace is begun when the pools are there: what cannot run leaves an older file alone") {
    const files       f;
    const std::string older = "# route_trace v1\nolder";
    const std::string trace = f.dir.write("t.csv", older);
    {
        const model_ptr model = opened(f.tiers_path, { number("hobbit.pools", 1000), text("hobbit.trace", trace) });
        refused_context(model);
    }
    CHECK(temp_dir::read(trace) == older);
    {
        const model_ptr model = opened(f.tiers_path, { text("hobbit.trace", trace) });
        context_of(model, 1);
    }
    CHECK(temp_dir::read(trace).find("older") == std::string::npos);

    const std::string nowhere = f.dir.path("nowhere/t.csv");
    const model_ptr   model   = opened(f.tiers_path, { text("hobbit.trace", nowhere) });
    CHECK(refused_context(model).find("the trace '" + nowhere + "' cannot be written") == 0);
}

TEST_CASE("stored settings that make no sense are refused, with the file that has them") {
    files f;
    gguf_set_val_f64(f.tiers.keys(), "hobbit.prefetch", -1.0);
    f.tiers_path = f.tiers.write(f.tiers_path);
    CHECK(refused(f.tiers_path, {}).find("the settings stored in '" + f.tiers_path + "'") == 0);
    CHECK(opened(f.tiers_path, { number("hobbit.prefetch", 1) }));
}

//
// computing, through ggml's registry
//

TEST_CASE("the backend computes a layer as the CPU does, and its buffer keeps the model alive") {
    const files       f;
    const moe_model   shape;
    const layer_input input = random_input(shape, 3, 41);
    cpu_backend       cpu;
    layer_graph       plain(shape, input);
    plain.set_plain(
        [&](const std::string & part) { return plain_weight{ shape.high, f.plain.data(moe_model::name(0, part)) }; });
    REQUIRE(ggml_backend_graph_compute(cpu.backend, plain.graph) == GGML_STATUS_SUCCESS);

    model_ptr      model   = opened(f.plain_path, { number("hobbit.pools", 1 << 20) });
    context_ptr    context = context_of(model, 3);
    ggml_backend_t backend = ggml_backend_init_by_name("HOBBIT", nullptr);
    REQUIRE(backend);
    {
        layer_graph cached(shape, input);
        cached.set_in_buffer(hobbit_buffer_type(model.get(), 0));
        const hobbit_model * held = model.get();
        model.reset();
        context.reset();
        ggml_backend_dev_t device = ggml_backend_get_device(backend);
        for (int i = 0; i < ggml_graph_n_nodes(cached.graph); i++) {
            CHECK(ggml_backend_dev_supports_op(device, ggml_graph_node(cached.graph, i)));
            CHECK_FALSE(ggml_backend_dev_supports_op(device, ggml_graph_node(plain.graph, i)));
        }
        CHECK(ggml_backend_graph_compute(backend, cached.graph) == GGML_STATUS_SUCCESS);
        CHECK(cached.output() == plain.output());

        const auto stats = counters_of(held);
        CHECK(stats.at("layers_computed") == 1);
        CHECK(stats.at("selections_high") == 6); // 3 tokens x 2 experts
        CHECK(stats.at("bytes_read") > 0);
    }
    ggml_backend_free(backend);
}

TEST_CASE("an evaluation callback, for which each node is a graph, changes nothing of a layer that skips experts") {
    const files       f;
    const moe_model   shape;
    const layer_input input   = random_input(shape, 3, 41);
    const model_ptr   model   = opened(f.plain_path, { number("hobbit.pools", 1 << 20), number("hobbit.t1", 0),
                                                       number("hobbit.t2", 0), number("hobbit.strict", 1) });
    const context_ptr context = context_of(model, 3);
    ggml_backend_ptr  backend(ggml_backend_init_by_name("HOBBIT", nullptr));
    rows              outputs[2];
    for (const bool by_node : { false, true }) {
        layer_graph layer(shape, input, true);
        layer.set_in_buffer(hobbit_buffer_type(model.get(), 0));
        const int n_nodes = ggml_graph_n_nodes(layer.graph);
        for (int i = 0; i < n_nodes; i += by_node ? 1 : n_nodes) {
            ggml_cgraph view = ggml_graph_view(layer.graph, i, by_node ? i + 1 : n_nodes);
            CHECK(ggml_backend_graph_compute(backend.get(), &view) == GGML_STATUS_SUCCESS);
        }
        outputs[by_node] = layer.output();
    }
    CHECK(outputs[0] == outputs[1]);
    CHECK(counters_of(model.get()).at("selections_skipped") == 6);
}

TEST_CASE("an error while computing fails the graph and is kept") {
    const files       f;
    const moe_model   shape;
    const layer_input input = random_input(shape, 1, 43);
    const model_ptr   model = opened(f.plain_path, { number("hobbit.pools", 1 << 20) });
    context_of(model, 1);
    std::filesystem::resize_file(f.plain_path, 1000); // after it was opened
    hobbit_clear_last_error();
    ggml_backend_t backend = ggml_backend_init_by_name("HOBBIT", nullptr);
    REQUIRE(backend);
    {
        layer_graph cached(shape, input);
        cached.set_in_buffer(hobbit_buffer_type(model.get(), 0));
        CHECK(ggml_backend_graph_compute(backend, cached.graph) == GGML_STATUS_FAILED);
    }
    CHECK(last_error() == "'" + f.plain_path + "' changed while it was in use: load the model again");
    ggml_backend_free(backend);
}
