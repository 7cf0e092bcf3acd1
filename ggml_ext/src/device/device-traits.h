// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "model/expert.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hobbit {

// Properties and workarounds of the devices of one ggml backend. To support a further backend, or to work around a
// property of one, change the table in device-traits.cpp. Constant; any thread may read it.
struct device_traits {
    const char * backend; // its name in ggml's registry

    // Each ggml backend that is opened on the device is a stream of its own: a copy in one runs beside a graph in
    // another. An event behind a copy to host memory says that it has ended.
    bool copies_in_streams;

    // ggml_backend_synchronize returns when the request was sent. Only reading a result back waits for it.
    bool synchronizes_early;

    // The driver's copying thread spins, so the CPU's threads leave it one core: they would wait for each other.
    bool spins_on_copies;

    // The share of the time that background uploads may take once the pool is full. It is small where they wait in the
    // same line as requests to compute, and 1 where they run beside these.
    double upload_share;

    // Kernels read past the end of a matrix and multiply by zero what they find there, which must not be NaN.
    bool reads_past_end;

    // The number of weights that a kernel loads at once from a type without blocks: matrices begin at a multiple.
    int64_t load_width;

    // Kernels count the blocks from the first matrix of a tensor in 32 bits.
    bool counts_in_32_bits;
};

// The traits of the device's backend; null where a pool cannot be on it: other backends keep more for a tensor than its
// bytes, state of their own or room behind a result.
const device_traits * find_traits(ggml_backend_dev_t device);

// REQUIRES: find_traits is not null.
const device_traits & traits_of(ggml_backend_dev_t device);

// Returns true if the device computes in host memory, so that it uses what lies there in place.
bool is_host_device(ggml_backend_dev_t device);

// Returns true if the device's kernels read this memory of the host in place, as those of an integrated GPU may.
bool shares_memory(ggml_backend_dev_t device, ggml_backend_buffer_type_t memory);

// How many of `n_threads` CPU threads compute beside the device.
int threads_beside(ggml_backend_dev_t device, int n_threads);

// Memory for copies to and from the backend's device, page-locked if its driver provides that; null: there is none.
ggml_backend_buffer_ptr alloc_host_buffer(ggml_backend_t backend, size_t size);

// Free bytes of the device's memory; 0 where the device does not report them.
size_t free_memory(ggml_backend_dev_t device);

// Chooses the devices that compute experts. Thread-safety: as ggml's registry, which changes when a model with a
// further device is opened.

// The devices with these names, separated by commas; the CPU where `names` is empty. Each of several devices must have
// memory of its own. The error for an unknown name lists the known ones.
status find_compute_devices(const std::string & names, std::vector<ggml_backend_dev_t> & devices);

// The names, for find_compute_devices, of those `devices` that can hold experts and have memory of their own, without
// repetitions. Integrated GPUs are left out, since their memory is the host's. A warning names each other device that
// cannot be used.
std::string usable_devices(const std::vector<ggml_backend_dev_t> & devices);

// A device may multiply weights faster in a buffer type of its own (ggml's extra buffer types). Its layout is the
// file's in host memory, and else another one ("repacked" weights), which has the size of the file's and keeps row
// groups in their order, so that a matrix can be converted in pieces.
//
// Thread-safety: all functions may be called from any thread.

// The extra buffer type of this name; null: the device has none.
ggml_backend_buffer_type_t extra_type(ggml_backend_dev_t device, const char * name);

// The buffer type that llama.cpp would choose for experts of this type and shape on `device`; null: the device's own.
ggml_backend_buffer_type_t packed_layout(ggml_backend_dev_t device, ggml_type type, const matrix_shape & shape,
                                         uint32_t n_experts);

// Does one operation of the device multiply by `n_experts` such matrices, `stride` bytes apart?
bool multiplies_experts(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft, ggml_type type,
                        const matrix_shape & shape, size_t stride, int64_t n_experts);

// Puts a tensor of weights into the buffer that holds its data.
void init_weights(ggml_backend_buffer_t buffer, ggml_tensor * tensor);

// The number of rows to convert at once, in about `n_bytes`: whole row groups of every layout.
int64_t rows_per_chunk(size_t n_bytes, size_t row_size);

// Writes rows in the file's layout to `dst`, which lies in `buffer`, in the layout of the buffer's type. With `stream`,
// a backend of the buffer's device, the copy is asynchronous: it is complete when `stream` is synchronized.
void set_rows(ggml_backend_buffer_t buffer, ggml_type type, const matrix_shape & rows, const char * src, char * dst,
              ggml_backend_t stream = nullptr);

// Sets `size` bytes at `dst` to zero. REQUIRES: `buffer`, which holds them, is in a device's own memory.
void set_zeros(ggml_backend_buffer_t buffer, char * dst, size_t size);

} // namespace hobbit
