// SPDX-License-Identifier: MIT
#include "llama-hobbit.h"

#include "ggml.h"

#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>

static thread_local int llama_hobbit_n_guards = 0; // guards of this thread

thread_local hobbit_model * llama_hobbit_guard::loaded = nullptr;

static std::mutex            llama_hobbit_mutex;
static ggml_abort_callback_t llama_hobbit_previous = nullptr; // under the mutex; for threads without a guard

// `failed`: "FILE:LINE: what failed". ggml ends the process when this returns.
static void llama_hobbit_on_abort(const char * failed) {
    if (llama_hobbit_n_guards == 0) {
        std::unique_lock<std::mutex> lock(llama_hobbit_mutex);
        const ggml_abort_callback_t  previous = llama_hobbit_previous;
        lock.unlock();
        if (previous) {
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
    llama_hobbit_previous                = previous == llama_hobbit_on_abort ? llama_hobbit_previous : previous;
}

llama_hobbit_guard::~llama_hobbit_guard() {
    loaded = --llama_hobbit_n_guards > 0 ? loaded : nullptr;
}
