// SPDX-License-Identifier: MIT
#include "io/host-memory.h"

#include "ggml-impl.h"

namespace hobbit {

// A driver that has no more pinned memory returns ordinary memory. Where a driver maps pinned memory in a special way,
// the system may refuse direct I/O into it.
static status try_memory(ggml_backend_buffer_type_t memory, file_reader & reader) {
    const size_t                  a = file_reader::alignment;
    const ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(memory, 2 * a));
    if (!buffer || ggml_backend_buffer_get_type(buffer.get()) != memory) {
        return status::error("the driver gives none");
    }
    return reader.read_at(0, 0, a, 1, aligned_base(buffer.get(), a));
}

ggml_backend_buffer_type_t find_pinned_memory(const std::vector<ggml_backend_dev_t> & devices, file_reader & reader) {
    for (ggml_backend_dev_t device : devices) {
        ggml_backend_buffer_type_t memory = ggml_backend_dev_host_buffer_type(device);
        if (!memory) {
            continue;
        }
        const status s = try_memory(memory, reader);
        if (s.ok()) {
            return memory;
        }
        GGML_LOG_WARN("hobbit: experts are copied to %s from ordinary memory, which is slower than from page-locked "
                      "memory (%s)\n",
                      ggml_backend_dev_name(device), s.message().c_str());
    }
    return ggml_backend_cpu_buffer_type();
}

} // namespace hobbit
