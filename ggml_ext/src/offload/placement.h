// SPDX-License-Identifier: MIT
#pragma once

#include "hobbit.h"
#include "offload/latency-means.h"
#include "offload/upload-gain.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hobbit {

// Handling of a miss of the device's cache.
enum class compute_mode {
    gpu,         // the expert is uploaded
    cooperative, // the CPU computes the expert; in a prompt it is uploaded
    automatic,   // the faster one, further uses counted
    twiddler,    // the faster one for this layer
};

// Decides who computes the missing experts of a layer, and when experts are uploaded in the background. In automatic
// mode the CPU computes a missing expert at once, unless it takes longer than uploading it and computing it on the
// device:
//   cpu + saved > launch + upload + device, where saved = 0.15 * the further hits of an upload * (cpu - device)
// launch is the time of the hits where they ran ahead, since an upload then needs a launch of its own, and most of a
// launch's time is the same for any number of experts. Times are those at which CPU and link end with the layer's
// experts so far, so that several misses keep both busy and end together. One of the two gets all where that is faster:
// on few cores they slow each other down. In mode twiddler (Algorithm 1 of that paper) no time is saved, and the
// background uploads into free slots alone.
//
// Times are running means of what was measured, 0 before the first sample. The device's time is measured now and then,
// because the CPU waits for it then.
//
// Thread-safety: none. Pure: no clock.
class placement {
  public:
    // kind_bytes: bytes of an upload, [kind]. Background uploads take at most upload_share of the time.
    placement(const std::vector<size_t> & kind_bytes, double upload_share, compute_mode mode);

    // Places the experts of a layer that computes so many tokens. Experts present on the device stay there, and in
    // cooperative mode all experts of a prompt. The CPU gets one in 1024 of the experts that the device computes
    // faster, to measure it again. is_ahead: the device has computed the present ones.
    cpu_experts place(const std::vector<expert_work> & work, int64_t n_tokens, bool is_ahead = false);

    // Returns true if the layer that was placed last should be measured; see device_took.
    bool measures_device() const { return measures_device_; }

    // Samples: the time of the CPU's experts, of the device's without uploads, and of an upload of so many bytes.
    void cpu_took(const std::vector<expert_work> & work, const cpu_experts & on_cpu, double seconds);

    void device_took(const std::vector<expert_work> & work, const cpu_experts & on_cpu, double seconds) {
        device_.took(work, on_cpu, false, seconds);
    }

    void link_took(double bytes, double seconds);

    upload_gain & gain() { return gain_; }

    // So much time has passed. Time that no upload used is not saved up.
    void pass(double seconds) { credit_ = std::min(0.0, credit_ + upload_share_ * seconds); }

    // Returns true if an upload may begin in the background; it has begun.
    bool may_upload() const { return mode_ != compute_mode::twiddler && credit_ >= 0.0; }
    void begin_upload(uint32_t kind) { credit_ -= upload_seconds(kind); }

    // Times for each kind and number of rows that was measured.
    std::vector<hobbit_latency> latencies() const;

  private:
    double upload_seconds(uint32_t kind) const { return seconds_per_byte_ * double(kind_bytes_[kind]); }
    double seconds_beside(const expert_work & w) const;  // on the CPU, beside an upload
    double saved_by_upload(const expert_work & w) const; // later

    // The missing experts that the CPU gets: those that end sooner there, or all or none where one of the two alone is
    // faster than both together.
    cpu_experts faster_on_cpu(const std::vector<expert_work> & work, bool is_ahead) const;

    const std::vector<size_t> kind_bytes_;
    const double              upload_share_;
    const compute_mode        mode_;
    latency_means             cpu_;
    latency_means             cpu_beside_; // in layers with uploads
    latency_means             device_;
    double                    seconds_per_byte_ = 0.0; // speed of the link
    upload_gain               gain_;
    double                    credit_          = 0.0; // seconds of the link; negative: not yet earned
    uint32_t                  n_left_          = 0;   // experts that the CPU would take longer for
    uint32_t                  n_measurable_    = 0;   // layers
    bool                      measures_device_ = false;
    bool                      tries_cpu_       = false; // the layer that was placed last
};

} // namespace hobbit
