// SPDX-License-Identifier: MIT
#pragma once

#include "hobbit.h"
#include "model/expert.h"
#include "plan/batch-info.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace hobbit {

// An expert that a layer needs.
struct expert_work {
    uint64_t bytes;      // bytes of an upload: experts of one size are alike
    uint32_t n_rows;     // at least 1
    bool     is_present; // on the device
};

using cpu_experts = std::vector<bool>; // [expert] whether the CPU computes it

// Running means of the time that an expert takes in one place, for each size of expert and number of rows. Numbers of
// rows count as the power of two below them. Pure: no clock.
class latency_means {
  public:
    explicit latency_means(bool is_constant = false) : is_constant_(is_constant) {}

    // Seconds for one expert. A number of rows without a sample counts in proportion to the next smaller one that has
    // samples, or as that one if is_constant (Twiddler's GPU); 0: there is none.
    double seconds(const expert_work & w) const {
        const auto   found = by_size_.find(w.bytes);
        const size_t own   = cell_of(w.n_rows);
        for (size_t cell = own + 1; found != by_size_.end() && cell-- > 0;) {
            if (found->second[cell].n_samples > 0) {
                return found->second[cell].seconds * double(size_t(1) << (is_constant_ ? 0 : own - cell));
            }
        }
        return 0.0;
    }

    // The mean of a size for 2^cell rows, or more up to the next cell; 0: it has no sample.
    double mean_seconds(uint64_t bytes, size_t cell) const {
        const auto found = by_size_.find(bytes);
        return found == by_size_.end() ? 0.0 : found->second[cell].seconds;
    }

    // All sizes of experts that have a sample, in bytes.
    std::set<uint64_t> sizes() const {
        std::set<uint64_t> all;
        std::for_each(by_size_.begin(), by_size_.end(), [&](const auto & each) { all.insert(each.first); });
        return all;
    }

    static constexpr size_t n_cells = 16;

    // A sample: the layer's experts that were computed here took so long, one after the other. Each mean gets its share
    // by what was expected, or all alike if one has no sample.
    void took(const std::vector<expert_work> & work, const cpu_experts & on_cpu, bool is_cpu, double all) {
        std::vector<std::pair<mean *, double>> expected;
        double                                 sum    = 0.0;
        bool                                   is_new = false;
        for (size_t i = 0; i < work.size(); i++) {
            if (on_cpu[i] == is_cpu) {
                expected.emplace_back(&at(work[i]), seconds(work[i]));
                sum    += expected.back().second;
                is_new  = is_new || expected.back().second == 0.0;
            }
        }
        for (auto & [m, seconds] : expected) {
            const double sample  = is_new ? all / double(expected.size()) : all * seconds / sum;
            m->n_samples         = std::min(m->n_samples + 1, MOST_COUNTED);
            m->seconds          += (sample - m->seconds) / m->n_samples;
        }
    }

    // The next sample replaces the mean.
    void forget(const expert_work & w) { at(w).n_samples = 0; }

  private:
    struct mean {
        double   seconds   = 0.0;
        uint32_t n_samples = 0;
    };

    static size_t cell_of(uint32_t n_rows) { return std::min(n_cells - 1, size_t(std::log2(n_rows))); }

    mean & at(const expert_work & w) { return by_size_[w.bytes][cell_of(w.n_rows)]; }

    static constexpr uint32_t MOST_COUNTED = 64; // samples that a mean goes back

    const bool                                    is_constant_;
    std::map<uint64_t, std::array<mean, n_cells>> by_size_; // [bytes]
};

// How many more uses an upload serves than it costs: the mean over the uploads that evicted an expert, of the
// newcomer's uses less the victim's. A pair is observed until the newcomer is evicted or the victim comes back. Where
// all experts are equally likely this is 0; where a text stays with its experts it is their further uses.
//
// Thread-safety: none. Pure: no clock.
class upload_gain {
  public:
    // A newcomer was uploaded into the victim's slot.
    void replaced(const expert_tier & newcomer, const expert_tier & victim) {
        const key in  = key_of(newcomer);
        const key out = key_of(victim);
        end_pair(in);
        end_pair(out);
        pairs_[in]   = { out, 1.0 };
        pairs_[out]  = { in, -1.0 };
        sum_        -= sum_ / most_counted;
        n_uploads_  += 1.0 - n_uploads_ / most_counted;
    }

    // A layer uses the expert. REQUIRES: told before the layer's uploads
    void used(const expert_tier & e) {
        const auto found  = pairs_.find(key_of(e));
        sum_             += found == pairs_.end() ? 0.0 : found->second.gain;
    }

    // Not negative; 0 with few samples.
    double further_hits() const { return n_uploads_ < few ? 0.0 : std::max(0.0, sum_ / n_uploads_); }

  private:
    using key = std::tuple<layer_id, uint32_t, tier_id>;

    struct half {
        key    other; // the other one of the pair
        double gain;  // gain of a use: 1 for the newcomer, -1 for the victim
    };

    static constexpr double most_counted = 256.0; // uploads that the mean goes back
    static constexpr double few          = 16.0;  // uploads, which prove nothing

    static key key_of(const expert_tier & e) { return { e.id.layer, e.id.expert, e.tier }; }

    void end_pair(const key & one) {
        const auto found = pairs_.find(one);
        if (found != pairs_.end()) {
            pairs_.erase(found->second.other);
            pairs_.erase(found);
        }
    }

    std::map<key, half> pairs_; // [newcomer] and [victim]; an expert is in one pair
    double              sum_       = 0.0;
    double              n_uploads_ = 0.0;
};

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
    // Background uploads take at most upload_share of the time.
    placement(double upload_share, compute_mode mode) :
        upload_share_(upload_share), mode_(mode), device_(mode == compute_mode::twiddler) {}

    // Places the experts of a layer that computes so many tokens. Experts present on the device stay there, and in
    // cooperative mode all experts of a prompt. The CPU gets one in 1024 of the experts that the device computes
    // faster, to measure it again. is_ahead: the device has computed the present ones.
    cpu_experts place(const std::vector<expert_work> & work, int64_t n_tokens, bool is_ahead = false) {
        const bool compares  = mode_ == compute_mode::automatic || mode_ == compute_mode::twiddler;
        const bool cpu_all   = mode_ == compute_mode::cooperative && n_tokens <= batch_info::max_generated;
        bool       is_hit    = false;
        bool       is_upload = false;
        tries_cpu_           = false;
        cpu_experts on_cpu   = compares ? faster_on_cpu(work, is_ahead) : cpu_experts(work.size(), false);
        for (size_t i = 0; i < work.size(); i++) {
            if (work[i].is_present) {
                is_hit = true;
                continue;
            }
            if (compares && !on_cpu[i] && ++n_left_ % CPU_EXPERTS == 0) {
                on_cpu[i]  = true;
                tries_cpu_ = true;
                cpu_.forget(work[i]);
                cpu_beside_.forget(work[i]);
            }
            on_cpu[i] = on_cpu[i] || cpu_all;
            is_upload = is_upload || !on_cpu[i];
        }
        measures_device_ = compares && is_hit && !is_upload && n_measurable_++ % DEVICE_LAYERS == 0;
        return on_cpu;
    }

    // Returns true if the layer that was placed last should be measured; see device_took.
    bool measures_device() const { return measures_device_; }

    // Samples: the time of the CPU's experts, of the device's without uploads, and of an upload of so many bytes.
    void cpu_took(const std::vector<expert_work> & work, const cpu_experts & on_cpu, double seconds) {
        bool is_beside = false;
        for (size_t i = 0; i < work.size(); i++) {
            is_beside = is_beside || (!work[i].is_present && !on_cpu[i]);
        }
        if (is_beside) {
            cpu_beside_.took(work, on_cpu, true, seconds);
        }
        if (!is_beside || tries_cpu_) { // else it may never be measured alone
            cpu_.took(work, on_cpu, true, seconds);
        }
    }

    void device_took(const std::vector<expert_work> & work, const cpu_experts & on_cpu, double seconds) {
        device_.took(work, on_cpu, false, seconds);
    }

    void link_took(double bytes, double seconds) {
        const double sample  = seconds / bytes;
        seconds_per_byte_   += seconds_per_byte_ > 0.0 ? (sample - seconds_per_byte_) / LINK_MEAN : sample;
    }

    upload_gain & gain() { return gain_; }

    // So much time has passed. Time that no upload used is not saved up.
    void pass(double seconds) { credit_ = std::min(0.0, credit_ + upload_share_ * seconds); }

    // Returns true if an upload may begin in the background; it has begun.
    bool may_upload() const { return mode_ != compute_mode::twiddler && credit_ >= 0.0; }
    void begin_upload(uint64_t bytes) { credit_ -= upload_seconds(bytes); }

    // Times for each size and number of rows that was measured.
    std::vector<hobbit_latency> latencies() const {
        std::vector<hobbit_latency> found;
        std::set<uint64_t>          sizes = cpu_.sizes();
        sizes.merge(device_.sizes());
        for (const uint64_t bytes : sizes) {
            for (size_t cell = 0; cell < latency_means::n_cells; cell++) {
                const double cpu    = cpu_.mean_seconds(bytes, cell);
                const double device = device_.mean_seconds(bytes, cell);
                if (cpu > 0.0 || device > 0.0) {
                    found.push_back({ bytes, 1u << cell, cpu, device, upload_seconds(bytes) });
                }
            }
        }
        return found;
    }

  private:
    double upload_seconds(uint64_t bytes) const { return seconds_per_byte_ * double(bytes); }

    // on the CPU, beside an upload
    double seconds_beside(const expert_work & w) const {
        const double beside = cpu_beside_.seconds(w);
        return beside > 0.0 ? beside : cpu_.seconds(w);
    }

    // later
    double saved_by_upload(const expert_work & w) const {
        const expert_work one      = { w.bytes, 1, false };
        const double      one_less = std::max(0.0, cpu_.seconds(one) - device_.seconds(one));
        return mode_ == compute_mode::twiddler ? 0.0 : COUNTED_HITS * gain_.further_hits() * one_less;
    }

    // The missing experts that the CPU gets: those that end sooner there, or all or none where one of the two alone is
    // faster than both together.
    cpu_experts faster_on_cpu(const std::vector<expert_work> & work, bool is_ahead) const {
        double launch = 0.0;
        for (const expert_work & w : work) {
            launch += is_ahead && w.is_present && mode_ == compute_mode::automatic ? device_.seconds(w) : 0.0;
        }
        double      all_on_cpu = 0.0;
        double      all_upload = launch;
        double      cpu        = 0.0; // seconds of the layer's experts so far
        double      link       = 0.0;
        cpu_experts on_cpu;
        for (const expert_work & w : work) {
            const double on_cpu_at    = cpu + (link > 0.0 ? seconds_beside(w) : cpu_.seconds(w));
            const double on_device_at = launch + link + upload_seconds(w.bytes) + device_.seconds(w);
            const bool   is_cpus      = !w.is_present && on_cpu_at + saved_by_upload(w) <= on_device_at;
            on_cpu.push_back(is_cpus);
            if (w.is_present || mode_ == compute_mode::twiddler) { // twiddler decides each expert by itself
                continue;
            }
            all_on_cpu             += cpu_.seconds(w) + (is_cpus ? 0.0 : saved_by_upload(w));
            all_upload             += upload_seconds(w.bytes) - (is_cpus ? saved_by_upload(w) : 0.0);
            (is_cpus ? cpu : link) += is_cpus ? seconds_beside(w) : upload_seconds(w.bytes);
        }
        const bool is_shared = cpu > 0.0 && link > 0.0;
        if (is_shared && SHARING * std::max(cpu, launch + link) >= std::min(all_on_cpu, all_upload)) {
            for (size_t i = 0; i < work.size(); i++) {
                on_cpu[i] = !work[i].is_present && all_on_cpu <= all_upload;
            }
        }
        return on_cpu;
    }

    // The share of an upload's further hits that counts: background uploads bring others anyway.
    static constexpr double   COUNTED_HITS  = 0.15;
    static constexpr double   SHARING       = 1.1;  // CPU and link together take so much longer than their experts
    static constexpr double   LINK_MEAN     = 16.0; // samples that the link's mean goes back
    static constexpr uint32_t DEVICE_LAYERS = 64;   // measures every n-th layer
    static constexpr uint32_t CPU_EXPERTS   = 1024; // gives the CPU every n-th expert that it would take longer for

    const double       upload_share_;
    const compute_mode mode_;
    latency_means      cpu_;
    latency_means      cpu_beside_; // in layers with uploads
    latency_means      device_;
    double             seconds_per_byte_ = 0.0; // speed of the link
    upload_gain        gain_;
    double             credit_          = 0.0; // seconds of the link; negative: not yet earned
    uint32_t           n_left_          = 0;   // experts that the CPU would take longer for
    uint32_t           n_measurable_    = 0;   // layers
    bool               measures_device_ = false;
    bool               tries_cpu_       = false; // the layer that was placed last
};

} // namespace hobbit
