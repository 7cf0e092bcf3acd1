// SPDX-License-Identifier: MIT
#include "record/use-history.h"

#include "ggml-impl.h"
#include "model/sidecar.h"

#include <algorithm>

namespace hobbit {

use_counts use_history::none() const {
    std::vector<uint32_t> n_used;
    for (layer_id layer = 0; layer < index_.n_layers(); layer++) {
        n_used.push_back(std::max(1u, index_.layer(layer).n_used));
    }
    return { n_used, index_.n_experts() };
}

void use_history::recall(const std::string & path, bool keeps_file) {
    use_counts uses = none();
    if (!index_.calibration().uses.empty()) {
        uses.add(index_.calibration().uses);
    }
    if (keeps_file) {
        path_          = beside_model(path, use_counts::suffix);
        const status s = uses.read(path_, index_.model_bytes());
        if (!s.ok()) {
            GGML_LOG_WARN("hobbit: %s: it is ignored, and replaced when the model is closed\n", s.message().c_str());
        }
    }
    counts_ = uses.counts();
    rates_  = uses.rates();
}

void use_history::recount() {
    use_counts uses = none();
    uses.add(counts_);
    rates_ = uses.rates();
}

// Another process may have written since the start.
void use_history::remember(const use_counts & run) const {
    if (path_.empty() || run.rates().empty()) {
        return;
    }
    use_counts uses = none();
    status     s    = uses.read(path_, index_.model_bytes()); // if it cannot be read, recall() has told
    uses.add(run.counts());
    s = uses.write(path_, index_.model_bytes());
    if (!s.ok()) {
        GGML_LOG_WARN("hobbit: %s: the next start will not know which experts were used\n", s.message().c_str());
    }
}

} // namespace hobbit
