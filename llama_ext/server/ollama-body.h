// SPDX-License-Identifier: MIT
#pragma once

// Requests in Ollama's form. These throw std::invalid_argument for what they cannot read.

#include "json.h"

#include <cstdint>
#include <string>

// The model that a request names. Clients that know tags send NAME:latest.
std::string server_ollama_name(const common_json & body);

// Milliseconds of a number of seconds, or of a text like 90s, 5m or 1h.
int64_t server_ollama_duration_ms(const common_json & value);

// The same request in OpenAI's form. is_raw: its prompt goes to the model as it is
common_json server_ollama_body(const common_json & body, bool is_chat, bool is_raw);
