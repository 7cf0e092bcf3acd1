// SPDX-License-Identifier: MIT
#pragma once

#include "modelled-device.h"

#include <string>

// Shared by the parts of the backend.
namespace modelled {

// Not destroyed, as nothing else here: threads may use a device while the process ends.
extern settings &        config;
extern device_observer * face; // null: the backend is not loaded yet

template <typename F>
void tell(F what) {
    const std::lock_guard<std::mutex> lock(device_lock());
    if (face) {
        what(*face);
    }
}

struct device_context {
    int                      index;
    std::string              name;
    size_t                   used = 0; // bytes, guarded by device_lock
    ggml_backend_buffer_type memory;
    ggml_backend_buffer_type host;
    int                      queue = NO_STREAM; // the only one, see settings::one_queue
};

inline device_context & device_of(ggml_backend_dev_t dev) {
    return *static_cast<device_context *>(dev->context);
}

// Makes a copy, and tells of it.
void move(const device_context & device, int stream, direction way, const void * source, const void * target,
          size_t size, const ggml_tensor * tensor);

// Work takes longer than it must, see settings.
void linger(bool has_work);

// The calling thread waits for the stream.
void synchronize(int stream);

// Returns true if the tensor lies in the device's memory.
bool is_of(const ggml_tensor * tensor, const device_context & device);

int                   open_stream(const device_context & device);
ggml_backend_device_i device_interface();

} // namespace modelled
