// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "base/text-file.h"
#include "plan/batch-info.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace hobbit {

// The model that the first lines of a trace describe.
struct trace_header {
    std::string           model; // name or path
    std::string           architecture;
    uint32_t              n_layers  = 0; // with routed experts
    uint32_t              n_experts = 0; // per layer, the largest
    std::vector<uint64_t> expert_bytes;  // [layer], one expert in high precision
    std::vector<uint32_t> n_used;        // [layer], experts of a token
};

// The version of an expert that was resident when the layer began.
enum trace_residency : uint8_t { TRACE_MISSING, TRACE_LOW, TRACE_HIGH };

// One layer's experts for tokens of the current batch, borrowed for the call.
struct trace_layer {
    uint32_t                             layer;
    uint32_t                             n_used;    // experts per token
    const std::vector<batch_info::row> & rows;      // [token], a subset of the batch's tokens, in its order
    const std::vector<int32_t> &         experts;   // [token][n_used], as the router ranked them
    const std::vector<float> &           weights;   // [token][n_used]; empty if unknown
    const std::vector<trace_residency> & residency; // [token][n_used]
    const std::vector<uint64_t> &
        bytes; // [token][n_used], read for the selection; 0 if an earlier one had requested it
};

// Writes the routing of a run, for the simulator. Comma-separated text in the format route_trace, version 1:
//
//   # route_trace v1
//   # model=NAME arch=NAME n_layer=N n_expert=N n_expert_used=N
//   # layer=I expert_bytes=N dense_bytes=0                       for each layer; other weights are not recorded
//   turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
//
// n_expert_used: the largest of any layer; the line of a layer with fewer ends in its own n_expert_used=N.
// turn: number of the sequence in the run; a sequence that begins again gets a new number.  phase: 0 if the batch had
// several tokens of the turn (prefill), 1 if it had one (decode).  step: number of the token in the turn, over both
// phases.  slot: rank of the expert.  weight: "nan" if unknown.  residency: see trace_residency.
// Rows are ordered by batch, then by layer, then by token.
//
// An incomplete trace is removed. Thread-safety: none.
class trace_writer {
  public:
    // Replaces an existing file. REQUIRES: not open.
    status open(const std::string & path, const trace_header & header);

    bool is_open() const { return file_.is_open(); }

    // Begins a new turn of the sequence. A token at position 0 begins one without this call.
    void begin_sequence(int32_t sequence);

    // Announces the batch that the next calls of add belong to.
    void begin_batch(const std::vector<batch_info::row> & tokens);

    // Buffered: a full disk may cause an error in a later call. All calls repeat the first error. REQUIRES: open.
    status add(const trace_layer & layer);

    // Hands all data to the operating system, or returns the first error. A no-op if not open.
    status close() { return file_.close(); }

  private:
    struct turn_state {
        uint32_t number;
        uint32_t n_steps;
    };

    struct token {
        batch_info::row row;
        uint32_t        turn;
        uint32_t        phase;
        uint32_t        step;
    };

    status add_token(const trace_layer & layer, size_t row, const token & at);

    text_file                     file_;
    std::map<int32_t, turn_state> turns_; // [sequence]
    uint32_t                      n_turns_ = 0;
    std::vector<token>            batch_;
};

} // namespace hobbit
