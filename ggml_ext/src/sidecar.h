// SPDX-License-Identifier: MIT
#pragma once

#include "gguf-file.h"
#include "status.h"

#include <string>
#include <vector>

namespace hobbit {

// A sidecar holds the further tiers of a GGUF that stays as it is, and a fingerprint of it (docs/format.md).

bool is_sidecar(const gguf_file & file);

std::string sidecar_base_name(const gguf_file & sidecar);

// MODEL.gguf -> MODEL.hobbit.gguf, MODEL-00001-of-00003.gguf -> MODEL.hobbit.gguf
std::string sidecar_default_path(const std::string & model_path);

// Whether the sidecar was made for this model: same size, expert tensors and samples of their data.
status check_sidecar(const gguf_file & sidecar, const std::vector<gguf_file> & model);

} // namespace hobbit
