// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace hobbit {

// What the first lines of a trace say about the model.
struct trace_header {
    std::string           model; // name or path
    std::string           architecture;
    uint32_t              n_layers  = 0; // with routed experts
    uint32_t              n_experts = 0; // per layer, the largest
    uint32_t              n_used    = 0; // per token
    std::vector<uint64_t> expert_bytes;  // [layer], one expert in high precision
};

// What was resident when the layer began.
enum trace_residency : uint8_t { TRACE_MISSING, TRACE_LOW, TRACE_HIGH };

// One layer's experts for tokens of the batch in hand. Pointers are borrowed for the call.
struct trace_layer {
    uint32_t                layer     = 0;
    uint32_t                n_tokens  = 0;       // some may be left out, the others keep the order of the batch
    uint32_t                n_used    = 0;       // experts per token
    const int32_t *         sequences = nullptr; // [n_tokens]
    const int32_t *         positions = nullptr; // [n_tokens]
    const int32_t *         experts   = nullptr; // [n_tokens][n_used], as the router ranked them
    const float *           weights   = nullptr; // [n_tokens][n_used]; null where they are not known
    const trace_residency * residency = nullptr; // [n_tokens][n_used]
    const uint64_t *        bytes     = nullptr; // [n_tokens][n_used], read for the selection, 0 where another one had
                                                 // asked for the expert before
};

// Writes which experts a run chose, for the simulator. Comma-separated text, in version 1 of a format known elsewhere:
//
//   # route_trace v1
//   # model=NAME arch=NAME n_layer=N n_expert=N n_expert_used=N
//   # layer=I expert_bytes=N dense_bytes=0                       for each layer; the size of the rest is not recorded
//   turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
//
// turn: number of the sequence in the run; a sequence that begins anew is another turn.  phase: 0 where the batch had
// several tokens of the turn (prefill), 1 where it had one (decode).  step: token of the turn, counted through both
// phases.  slot: rank of the expert.  weight: "nan" where it is not known.  residency: see trace_residency.
// Rows come batch by batch, in it layer by layer, in it token by token.
//
// A trace that cannot be written to its end is removed. Thread-safety: none.
class trace_writer {
  public:
    trace_writer() = default;
    ~trace_writer();

    trace_writer(const trace_writer &)             = delete;
    trace_writer & operator=(const trace_writer &) = delete;

    // Replaces a file of that name. REQUIRES: not open.
    status open(const std::string & path, const trace_header & header);

    bool is_open() const { return file_ != nullptr; }

    // The next tokens of the sequence are a new turn; so are those from position 0 on, without this call.
    void begin_sequence(int32_t sequence);

    // The tokens of the batch that the next calls of add are about.
    void begin_batch(uint32_t n_tokens, const int32_t * sequences, const int32_t * positions);

    // Buffered: a full disk may show at a later call. The first error is repeated for ever. REQUIRES: open.
    status add(const trace_layer & layer);

    // Without an error everything has been handed to the operating system. Does nothing when not open.
    status close();

  private:
    struct turn_state {
        uint32_t number;
        uint32_t n_steps;
    };

    struct token {
        int32_t  sequence;
        int32_t  position;
        uint32_t turn;
        uint32_t phase;
        uint32_t step;
    };

    void   add_token(const trace_layer & layer, uint32_t row, const token & at);
    status write_buffer();
    status fail(int error);

    std::string                   path_;
    FILE *                        file_ = nullptr;
    std::string                   buffer_;
    std::map<int32_t, turn_state> turns_; // [sequence]
    uint32_t                      n_turns_ = 0;
    std::vector<token>            batch_;
    status                        error_;
};

} // namespace hobbit
