// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <string>

// Waits for the memory of an answer of the request that this thread reads, which its response holds from then on.
// An answer that could never fit is refused; the error begins with `what`. Without a bound on requests this does
// nothing.
void server_requests_hold_answer(uint64_t size, const std::string & what);
