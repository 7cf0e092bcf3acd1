// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "execute/moe-executor.h"
#include "hobbit.h"
#include "model/expert-index.h"
#include "plan/batch-info.h"
#include "record/trace.h"

#include <string>

namespace hobbit {

// Passes the executor's reports on to a trace file and to an observer.
//
// Thread-safety: none.
class run_recorder {
  public:
    status open_trace(const std::string & path, const expert_index & index) { return trace_.open(path, index); }

    void set_observer(hobbit_observer observer, void * user_data);

    bool is_listening() const { return trace_.is_open() || observer_; }

    void begin_sequence(int32_t sequence) { trace_.begin_sequence(sequence); }
    void begin_batch(const batch_info & batch);
    void record(const layer_report & report);

    // The first error of writing the trace.
    const status & error() const { return error_; }

    // Completes the trace.
    status close() { return trace_.close(); }

  private:
    void call_observer(const layer_report & report) const;

    trace_writer    trace_;
    status          error_;
    hobbit_observer observer_  = nullptr;
    void *          user_data_ = nullptr;
};

} // namespace hobbit
