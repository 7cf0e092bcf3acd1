// SPDX-License-Identifier: MIT
#pragma once

#include "base/files.h"
#include "base/status.h"
#include "execute/moe-executor.h"
#include "hobbit.h"
#include "model/expert-index.h"
#include "plan/batch-info.h"

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace hobbit {

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
// phases.  slot: rank of the expert.  weight: "nan" if unknown.  residency: of the expert when the layer began, 0 none,
// 1 low, 2 high.  expert_bytes: read for the selection; 0 if an earlier one had requested it. In the header it is the
// size of a layer's expert in its best precision. Rows are ordered by batch, then by layer, then by token.
//
// An incomplete trace is removed. Thread-safety: none.
class trace_writer : public text_file {
  public:
    // Replaces an existing file. The index must outlive the trace. REQUIRES: not open.
    status open(const std::string & path, const expert_index & index);

    // Begins a new turn of the sequence. A token at position 0 begins one without this call.
    void begin_sequence(int32_t sequence) { turns_.erase(sequence); }

    // Announces the batch that the next calls of add belong to. A no-op if not open.
    void begin_batch(const std::vector<batch_info::row> & tokens);

    // Adds a layer, whose tokens are of the batch and in its order. Buffered: a full disk may cause an error in a later
    // call. All calls repeat the first error. A no-op if not open.
    status add(const layer_report & report);

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

    // Adds a token's routes. asked: experts that the layer has read for its batch so far.
    status add_token(const layer_report & report, size_t row, const token & at,
                     std::set<std::pair<int32_t, tier_id>> & asked);

    const expert_index *          index_ = nullptr;
    std::map<int32_t, turn_state> turns_; // [sequence]
    uint32_t                      n_turns_ = 0;
    std::vector<token>            batch_;
};

// A caller's observer; see hobbit_set_observer.
struct layer_observer {
    hobbit_observer call      = nullptr; // null: nobody observes
    void *          user_data = nullptr;

    void tell(const layer_report & report) const;
};

} // namespace hobbit
