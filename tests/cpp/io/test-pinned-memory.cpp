// SPDX-License-Identifier: MIT
#include "io/file-reader.h"

#include "fixtures/fake-reader.h"
#include "fixtures/page-locked.h"

#include <doctest/doctest.h>

using namespace hobbit;

// A device of which nothing is known but the memory that its driver locks.
struct device_with_memory {
    page_locked         memory;
    ggml_backend_device device = {};

    device_with_memory() {
        device.context                    = &memory;
        device.iface.get_name             = [](ggml_backend_dev_t) { return "Test0"; };
        device.iface.get_host_buffer_type = [](ggml_backend_dev_t d) {
            return &static_cast<page_locked *>(d->context)->type;
        };
    }
};

static ggml_backend_dev_t cpu() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

TEST_CASE("memory that the driver locks and the disk reads into is taken") {
    device_with_memory with;
    fake_reader        reader;
    reader.open_gate();
    CHECK(find_pinned_memory({ &with.device }, reader) == &with.memory.type);
    CHECK(reader.begun() == std::vector<uint64_t>{ 0 });
    CHECK(find_pinned_memory({ cpu(), &with.device }, reader) == &with.memory.type);
}

TEST_CASE("a device without such memory is given ordinary memory, and nothing is read") {
    fake_reader reader;
    CHECK(find_pinned_memory({ cpu() }, reader) == ggml_backend_cpu_buffer_type());
    CHECK(reader.begun().empty());
}

TEST_CASE("memory that direct I/O refuses is not taken") {
    device_with_memory with;
    fake_reader        reader;
    reader.open_gate();
    reader.fail_at(0, "cannot read 'm.gguf': Bad address");
    CHECK(find_pinned_memory({ &with.device }, reader) == ggml_backend_cpu_buffer_type());
}

TEST_CASE("a driver that has none left gives ordinary memory, and so it is named") {
    device_with_memory with;
    fake_reader        reader;
    with.memory.n_buffers = 0;
    CHECK(find_pinned_memory({ &with.device }, reader) == ggml_backend_cpu_buffer_type());
    CHECK(reader.begun().empty());
}
