// SPDX-License-Identifier: MIT
//
// Layers computed with pools on a device that has memory of its own, against the same layers on the CPU with plain
// tensors.
#include "cache/slot-memory.h"
#include "device/device-traits.h"
#include "fixtures/executor-fixture.h"
#include "fixtures/rpc-device.h"
#include "ggml-backend-impl.h"
#include "graph/lazy-backend.h"

#include <cstring>
#include <numeric>
#include <set>
#include <string>

static ggml_backend_dev_t device() {
    return rpc_device();
}

TEST_CASE("a layer of hits is one launch, one wait, one read and two copies: the choice, and numbers of slots") {
    const model_on_disk m;
    engine              e(m, 8, 0, {}, { device() });
    const layer_input   input = random_input(m.shape, 1, 5);
    e.compute(m, input);
    const uint64_t launches = e.counters.device_launches;
    const uint64_t waits    = e.counters.device_waits;
    const uint64_t reads    = e.counters.device_reads;
    const uint64_t copies   = e.counters.device_copies;
    const uint64_t bytes    = e.counters.device_copied_bytes;
    e.compute(m, input);
    CHECK(e.counters.device_launches - launches == 1);
    CHECK(e.counters.device_waits - waits == 1);
    CHECK(e.counters.device_reads - reads == 1);
    CHECK(e.counters.device_copies - copies == 2);
    CHECK(e.counters.device_copied_bytes > bytes);
}

TEST_CASE("in llama.cpp's queue a layer ends without a wait, and its experts keep their slots until the next one") {
    const model_on_disk m;
    engine              e(m, 2, 0, {}, { device() });
    inner_graph         queued(e.compute_on.backend, true);
    const layer_input   input = random_input(m.shape, 1, 5);
    layer_graph         graph(m.shape, input, false, ggml_backend_dev_buffer_type(device()));
    graph.set_cached(m.index, 0);
    REQUIRE(e.executor.compute(graph.graph, queued, nullptr).ok());
    CHECK(e.counters.device_waits == 0);

    const part_set parts   = m.index.layer(layer_id(0)).parts;
    expert_id      missing = { layer_id(0), 0 };
    while (e.cache.holds(missing, tier_id::high, parts)) {
        missing.expert++;
    }
    CHECK_FALSE(e.cache.prefetch(missing, tier_id::high, parts));
    e.executor.wait();
    CHECK(e.counters.device_waits == 1);
    CHECK(e.cache.prefetch(missing, tier_id::high, parts));
    CHECK(graph.output() == stock(m, input, tier_id::high));
}

TEST_CASE("where types differ, experts are as far apart as kernels of either type can count") {
    const model_on_disk m = model_on_disk::with_mixed_types(GGML_TYPE_F16, GGML_TYPE_Q4_0);
    engine              e(m, 8, 2, {}, { device() });
    for (const part_id part : { part_id::gate, part_id::up, part_id::down }) {
        const size_t stride = e.cache.stride({ 0, 0 }, tier_id::low, part);
        CHECK(stride >= m.index.locate(tier_id::low, 0, part, 6).size); // the size in F16
        CHECK(stride % (8 * sizeof(ggml_fp16_t)) == 0);
        CHECK(stride % ggml_type_size(GGML_TYPE_Q4_0) == 0);
    }
}

TEST_CASE("a bank has no more blocks of a part than kernels count in 32 bits") {
    const model_on_disk m;
    for (const tier_id tier : TIERS) {
        const part_location & at       = m.index.locate(tier, 0, part_id::up, 0);
        const uint64_t        n_blocks = at.size / ggml_type_size(at.type);
        const auto            most     = uint32_t(INT32_MAX / n_blocks);
        slot_layout           layout(m.index, tier, m.index.layers(), device(), ggml_backend_dev_buffer_type(device()));
        slot_layout::bank_plan plan;
        REQUIRE(layout.plan_banks(most + most / 2, plan).ok());
        CHECK(plan.slots_per_bank < most);
        CHECK(plan.slots_per_bank > most / 2);
        REQUIRE(layout.plan_banks(most, plan).ok());
        CHECK(plan.slots_per_bank == most);
    }
}

//
// other devices
//

static ggml_backend_buffer_type padded_rows;

// The device, with kernels that read up to eight blocks behind quantised matrices.
static ggml_backend_dev_t device_of_padded_rows() {
    static ggml_backend_device made  = *device();
    padded_rows                      = *ggml_backend_dev_buffer_type(device());
    padded_rows.device               = &made;
    padded_rows.iface.get_alloc_size = [](ggml_backend_buffer_type_t, const ggml_tensor * t) {
        return ggml_nbytes(t) + (ggml_is_quantized(t->type) ? 8 * ggml_type_size(t->type) : 0);
    };
    made.iface.get_buffer_type = [](ggml_backend_dev_t) { return &padded_rows; };
    return &made;
}

TEST_CASE("where types differ, zeros stand behind matrices whose kernels read on") {
    constexpr size_t    zeros = 8 * 34; // the larger type's
    const model_on_disk m     = model_on_disk::with_mixed_types(GGML_TYPE_Q8_0, GGML_TYPE_Q4_1);
    engine              e(m, 8, 1, {}, { device_of_padded_rows() });
    for (const expert_id id :
         { expert_id{ 0, 6 }, expert_id{ 0, 0 }, expert_id{ 0, 1 } }) { // an expert of either type, in a slot
        REQUIRE(e.cache.acquire(id, tier_id::low));
        for (const part_id part : { part_id::gate, part_id::up, part_id::down }) {
            e.cache.request(id, tier_id::low, part);
            REQUIRE(e.cache.wait(id, tier_id::low, part).ok());
            const part_location & at    = m.index.locate(tier_id::low, 0, part, id.expert);
            const std::string     bytes = device_bytes(e.cache, id, tier_id::low, part, at.size + zeros);
            CHECK(bytes == temp_dir::read(m.index.files()[0]).substr(at.offset, at.size) + std::string(zeros, '\0'));
            CHECK(e.cache.stride(id, tier_id::low, part) >= at.size + zeros);
        }
        e.cache.release(id, tier_id::low);
    }
    CHECK(e.counters.evictions == 2);
    for (const part_id part :
         { part_id::gate, part_id::up, part_id::down }) { // where they are alike, nothing stands between
        CHECK(e.cache.stride({ 0, 0 }, tier_id::high, part) == m.index.locate(tier_id::high, 0, part, 0).size);
    }
}

TEST_CASE("in memory that it shares with the host, experts are read in place, as far apart as kernels count") {
    constexpr size_t    zeros = 8 * 34;
    const model_on_disk m     = model_on_disk::with_mixed_types(GGML_TYPE_Q8_0, GGML_TYPE_Q4_1);
    stats               counters;
    failing_reader      reader;
    REQUIRE(reader.files.open(m.index.files()[0]).ok());
    slot_memory slots(m.index, tier_id::low, m.index.layers(), device_of_padded_rows(), ggml_backend_cpu_buffer_type(),
                      false);
    REQUIRE(slots.allocate(3).ok());
    loader l(reader, counters, 2);
    for (const expert_id id : { expert_id{ 0, 6 }, expert_id{ 0, 0 }, expert_id{ 0, 1 } }) {
        const uint32_t slot = id.expert % 3;
        for (const part_id part : { part_id::gate, part_id::up, part_id::down }) {
            const part_location & at     = m.index.locate(tier_id::low, id.layer, part, id.expert);
            const size_t          stride = slots.stride(id.layer, part);
            CHECK(stride % (std::lcm(20, 34)) == 0); // whole blocks of both types
            CHECK(stride % file_reader::alignment == 0);
            CHECK(stride >= aligned_span(at) + zeros);
            const part_target target = slots.target(slot, id, part);
            CHECK_FALSE(target.buffer);
            CHECK(slots.data(slot, id, part) == target.data + data_offset(at));
            std::memset(target.data, 0xff, stride);

            load_state state;
            l.submit(state, part, at, target, load_urgency::demand);
            REQUIRE(l.wait(state, part).ok());
            const std::string bytes(slots.data(slot, id, part), at.size + zeros);
            CHECK(bytes == temp_dir::read(m.index.files()[0]).substr(at.offset, at.size) + std::string(zeros, '\0'));
        }
    }
    CHECK(counters.bytes_transferred == 0);
}

TEST_CASE("a type that the device does not know is an error before anything is computed") {
    static ggml_backend_device made = *device();
    made.iface.supports_op          = [](ggml_backend_dev_t, const ggml_tensor * op) {
        return op->op != GGML_OP_MUL_MAT_ID || op->src[0]->type != GGML_TYPE_Q4_0;
    };
    const model_on_disk    m; // high F16, low Q4_0
    slot_layout::bank_plan plan;
    for (const tier_id tier : TIERS) {
        slot_layout  layout(m.index, tier, m.index.layers(), &made, ggml_backend_dev_buffer_type(device()));
        const status s = layout.plan_banks(4, plan);
        CHECK(s.ok() == (tier == tier_id::high));
        CHECK((s.ok() || s.message() == ggml_backend_dev_name(&made) +
                                            std::string(" cannot multiply by the low-precision experts (q4_0): choose "
                                                        "another device")));
    }
}

static ggml_backend_buffer_type small_buffers;

// The device, with buffers of 32 KiB at most.
static ggml_backend_dev_t device_of_small_buffers() {
    static ggml_backend_device made  = *device();
    small_buffers                    = *ggml_backend_dev_buffer_type(device());
    small_buffers.device             = &made;
    small_buffers.iface.get_max_size = [](ggml_backend_buffer_type_t) { return size_t(32 * 1024); };
    made.iface.get_buffer_type       = [](ggml_backend_dev_t) { return &small_buffers; };
    return &made;
}

TEST_CASE("a pool larger than a buffer of the device has several banks, and takes no more memory than one") {
    const model_on_disk m;
    engine              e(m, 16, 0, {}, { device_of_small_buffers() });
    CHECK(e.cache.n_slots(tier_id::high) < 16); // banks need memory beside their slots
    CHECK(e.cache.n_slots(tier_id::high) > 8);
    std::set<ggml_backend_buffer_t> banks;
    size_t                          bytes = 0;
    for (int64_t n_tokens : { 37, 1 }) {
        const layer_input input = random_input(m.shape, n_tokens, 3);
        CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
    }
    for (uint32_t i = 0; i < 16; i++) {
        const expert_id id = { layer_id(i / 8), i % 8 };
        REQUIRE(e.cache.acquire(id, tier_id::high));
        if (banks.insert(e.cache.buffer(id, tier_id::high, part_id::up)).second) {
            bytes += ggml_backend_buffer_get_size(e.cache.buffer(id, tier_id::high, part_id::up));
        }
        e.cache.release(id, tier_id::high);
    }
    CHECK(banks.size() > 1);
    CHECK(bytes <=
          16 * e.cache.demand(m.index.layers()).classes[tier_id::high][0].size + e.cache.overhead(tier_id::high));
}

static const char * name_of_vulkan(ggml_backend_reg_t) {
    return "Vulkan";
}

TEST_CASE("a device that lacks an operation is an error that names it") {
    static ggml_backend_reg    reg   = *ggml_backend_dev_backend_reg(device());
    static ggml_backend_device lacks = *device();
    reg.iface.get_name               = name_of_vulkan;
    lacks.reg                        = &reg;
    lacks.iface.get_name             = [](ggml_backend_dev_t) { return "Lacks0"; };
    lacks.iface.supports_op = [](ggml_backend_dev_t, const ggml_tensor * op) { return op->op != GGML_OP_SET_ROWS; };
    ggml_backend_device_register(&lacks);
    std::vector<ggml_backend_dev_t> found;
    CHECK(find_compute_devices("Lacks0", found).message() ==
          "Lacks0 cannot compute experts, which takes SET_ROWS: choose another device");
    CHECK(find_compute_devices(ggml_backend_dev_name(device()), found).ok());
    CHECK(found == std::vector<ggml_backend_dev_t>{ device() });

    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    CHECK(usable_devices({ nullptr, cpu, device(), &lacks, device() }) == ggml_backend_dev_name(device()));
    CHECK(usable_devices({ cpu, &lacks }).empty());

    static ggml_backend_device integrated = *device();
    integrated.iface.get_type             = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_IGPU; };
    static ggml_backend_device meta       = *device();
    meta.reg                              = nullptr;
    CHECK(usable_devices({ &integrated, &meta }).empty());
}

TEST_CASE("several devices are found in their order, each with memory of its own") {
    static ggml_backend_dev_t       other = start_rpc_device();
    const std::string               first = ggml_backend_dev_name(device());
    const std::string               last  = ggml_backend_dev_name(other);
    std::vector<ggml_backend_dev_t> found;
    CHECK(find_compute_devices(last + "," + first, found).ok());
    CHECK(found == std::vector<ggml_backend_dev_t>{ other, device() });
    CHECK(find_compute_devices(first + ",cpu", found).message() ==
          "CPU has no memory of its own, as each of several devices must: leave it out of hobbit.device");
    CHECK(find_compute_devices(first + "," + last + "," + first, found).message() ==
          "hobbit.device names " + first + " twice: leave one of them out");
    CHECK(find_compute_devices(first + ",CUDA7", found).message().find("there is no device 'CUDA7': choose one of ") ==
          0);
    CHECK(find_compute_devices(first + ",", found).message().find("there is no device '': choose one of ") == 0);
}

TEST_CASE("a device is opened when something is computed, and not before") {
    static int                 n_opened = 0;
    static ggml_backend_device counted  = *device();
    counted.iface.init_backend          = [](ggml_backend_dev_t, const char *) -> ggml_backend_t {
        return n_opened++ == 0 ? nullptr : ggml_backend_dev_init(device(), nullptr);
    };
    lazy_backend lazy(&counted);
    lazy.set_n_threads(2);
    lazy.set_abort_callback(nullptr, nullptr);
    CHECK(n_opened == 0);
    CHECK(lazy.open().message() ==
          ggml_backend_dev_name(device()) + std::string(" cannot be opened: choose another device"));
    CHECK(lazy.open().ok());
    CHECK(lazy.open().ok());
    CHECK(n_opened == 2);
    CHECK(lazy.backend() == lazy.inner().backend());
}
