// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>

#define MODELLED_API __attribute__((visibility("default")))

// A device for tests: a ggml backend with memory of its own, which computes with ggml's CPU backend, bit for bit. All
// work is done when it is issued, in the thread that issues it. Observers hear of it, and say what a device that
// works beside its host would have made of it: which accesses nothing orders, or how long they take.
//
// The program preloads the library (LD_PRELOAD), sets what the device is like (modelled_configure), registers the
// backend with its ggml, whose functions are global (RTLD_GLOBAL), and asks for the report at its end
// (modelled_report).
namespace modelled {

// Names are those of modelled_configure's text.
struct settings {
    std::string name       = "CUDA"; // the backend's, by which hobbit knows its traits; its devices are CUDA0, ...
    int         devices    = 1;
    bool        events     = true;
    bool        one_queue  = false; // as RPC: all in the order of the calls, nobody waits, no page-locked memory
    bool        compute    = true;  // false: graphs are observed, results and large copies stay what they were
    size_t      memory     = size_t(1) << 30; // bytes of a device
    bool        one_memory = false;           // an integrated GPU: kernels read the host's page-locked memory
    int         delay_us   = 0;               // work takes so much longer, so that luck hides no missing wait
};

struct bytes {
    const char * data;
    size_t       size;
};

enum class direction { to_device, to_host, on_device };

constexpr int NO_STREAM = -1; // the calling thread does it, and waits for its end

// The host's side of the copy is the source, the target, or neither.
struct copy {
    int          stream;
    direction    way;
    bytes        source;
    bytes        target;
    const char * tensor;
    bool         is_pinned; // the host's side is page-locked
    bool         is_taken;  // the source may change as soon as the call returns
};

inline bool computes_nothing(const ggml_tensor * t) {
    return ggml_is_empty(t) || ggml_op_is_empty(t->op);
}

// The n-th expert that a matmul's ids name. The matmul's own graph may look it up in a table.
inline int32_t expert_at(const ggml_tensor * ids, int64_t n) {
    const auto value = [](const ggml_tensor * t, int64_t i) {
        int32_t found;
        std::memcpy(&found,
                    static_cast<const char *>(t->data) + i / t->ne[0] * int64_t(t->nb[1]) +
                        i % t->ne[0] * int64_t(t->nb[0]),
                    sizeof(found));
        return found;
    };
    const ggml_tensor * made = ids->view_src ? ids->view_src : ids;
    return made->op == GGML_OP_GET_ROWS ? value(made->src[0], value(made->src[1], n)) : value(ids, n);
}

// Hears of all that a program does with the devices, in the order of its calls. Streams and events have numbers of
// their own, whichever device they are of. Every method is called with the devices' lock held, in the thread that
// called the device.
class device_observer {
  public:
    virtual ~device_observer() = default;

    virtual void on_open(int /* stream */, int /* device */) {}
    virtual void on_allocate(int /* device */, bytes /* memory */) {} // of the device, or shared with it
    virtual void on_free(int /* stream */, bytes /* memory */) {}

    // Called before and after the bytes move. A blocking copy is over then; for a stream's, see on_synchronize.
    virtual void on_copy(const copy & /* made */) {}
    virtual void on_copied(const copy & /* made */) {}

    // The calling thread, or the stream, sets memory to one value.
    virtual void on_clear(int /* stream */, bytes /* target */) {}

    // Called before the graph is computed.
    virtual void on_compute(int /* stream */, ggml_cgraph * /* graph */) {}

    // The calling thread waits for what the stream was given, or for what it had been when the event was recorded.
    virtual void on_synchronize(int /* stream */) {}
    virtual void on_event_synchronize(int /* event */) {}

    // The stream records an event, or what it is given from now on waits for one.
    virtual void on_record(int /* event */, int /* stream */) {}
    virtual void on_wait(int /* event */, int /* stream */) {}

    // A JSON object.
    virtual std::string report() = 0;
};

// The library's observer: of the order of accesses, or, for bench.compare --prices, of their times.
std::unique_ptr<device_observer> make_face();

// The lock of all devices. Observers get it held.
std::mutex & device_lock();

// Values of modelled_configure's text by name.
std::map<std::string, std::string> & configured();

// Changes the field where modelled_configure was told another value for the name.
template <typename T>
void configure(const std::string & name, T & field) {
    const auto told = configured().find(name);
    if (told != configured().end()) {
        std::istringstream(told->second) >> field;
    }
}

//
// parts of the backend
//

// Not destroyed, as nothing else here: threads may use a device while the process ends.
extern settings &        config;
extern device_observer * face; // null: the backend is not registered yet

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

extern "C" {
// Settings, and prices of the face, as "name=value name=value". REQUIRES: the backend is not registered yet
MODELLED_API void modelled_configure(const char * text);

// The face's report, a JSON object; valid until the next call.
MODELLED_API const char * modelled_report(void);

MODELLED_API ggml_backend_reg_t ggml_backend_init(void);
}
