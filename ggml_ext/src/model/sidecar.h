// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "model/gguf-file.h"

#include <string>
#include <vector>

namespace hobbit {

// A sidecar holds the further tiers of a GGUF that stays as it is, and a fingerprint of it (docs/format.md).

bool is_sidecar(const gguf_file & file);

std::string sidecar_base_name(const gguf_file & sidecar);

// The path at which a file of a model is looked for: MODEL.gguf and MODEL-00001-of-00003.gguf -> MODEL + suffix.
// A link counts as the file itself: what belongs to the model lies beside the link, under the link's name.
std::string beside_model(const std::string & model_path, const char * suffix);

// Returns true if the sidecar was made for this model: same size, expert tensors and samples of their data.
status check_sidecar(const gguf_file & sidecar, const std::vector<gguf_file> & model);

} // namespace hobbit
