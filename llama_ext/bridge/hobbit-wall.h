// SPDX-License-Identifier: MIT
#pragma once

// The functions of a library as Python calls them: an exception would end its process, and becomes a text here. Each
// library includes this once, with WALLED(name) for each function (hobbit_add_wall in cmake/llama-options.cmake).

#include <cstdio>
#include <cstring>
#include <exception>

static thread_local char hobbit_thrown_text[4096];

template <auto F>
struct hobbit_walled_function;

template <typename R, typename... A, R (*F)(A...)>
struct hobbit_walled_function<F> {
    static R call(A... arguments) {
        hobbit_thrown_text[0] = 0;
        try {
            return F(arguments...);
        } catch (const std::exception & e) {
            snprintf(hobbit_thrown_text, sizeof(hobbit_thrown_text), "%s", *e.what() ? e.what() : "an exception");
        } catch (...) {
            strcpy(hobbit_thrown_text, "an unknown exception");
        }
        return R();
    }
};

extern "C" {

// The text of the exception of the thread's last walled call, or null. Valid until the next one.
LLAMA_API const char * hobbit_thrown() {
    return hobbit_thrown_text[0] ? hobbit_thrown_text : nullptr;
}

// A function to call in the place of the one of this name; null where no header declares it.
LLAMA_API void * hobbit_walled(const char * name) {
#define WALLED(function)                                                                                               \
    if (strcmp(name, #function) == 0) {                                                                                \
        return reinterpret_cast<void *>(hobbit_walled_function<function>::call);                                       \
    }
    HOBBIT_WALLED
    return nullptr;
}
}
