// SPDX-License-Identifier: MIT
#include "llama-hobbit.h"

#include "ggml.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>

static thread_local int                   llama_hobbit_n_guards = 0; // guards of this thread
static std::mutex                         llama_hobbit_mutex;
static std::atomic<ggml_abort_callback_t> llama_hobbit_previous{ nullptr }; // for threads without a guard

// `failed`: "FILE:LINE: what failed". ggml ends the process when this returns.
static void llama_hobbit_on_abort(const char * failed) {
    if (llama_hobbit_n_guards == 0) {
        if (const ggml_abort_callback_t previous = llama_hobbit_previous) {
            previous(failed);
        } else {
            std::fprintf(stderr, "%s\n", failed);
        }
        return;
    }
    const char * folder = std::strrchr(failed, '/');
    const char * whose  = std::strstr(failed, "ggml_ext/") ? "internal error of the expert cache" : LLAMA_HOBBIT_FAULT;
    throw std::runtime_error(std::string(whose) + "; this check failed: " + (folder ? folder + 1 : failed));
}

llama_hobbit_guard::llama_hobbit_guard() {
    if (llama_hobbit_n_guards++ > 0) {
        return;
    }
    std::lock_guard<std::mutex> lock(llama_hobbit_mutex);
    const ggml_abort_callback_t previous = ggml_set_abort_callback(llama_hobbit_on_abort);
    if (previous != llama_hobbit_on_abort) {
        llama_hobbit_previous = previous;
    }
}

llama_hobbit_guard::~llama_hobbit_guard() {
    --llama_hobbit_n_guards;
}
