// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "model/gguf-file.h"

namespace hobbit {

// Refuses damaged metadata that llama.cpp takes for granted, and that would end the process.
status check_llama_header(const gguf_file & file);

} // namespace hobbit
