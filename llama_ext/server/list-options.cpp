// SPDX-License-Identifier: MIT
// Prints llama-server's options as JSON, and whether it has its web page, for `pyhobbit serve`. CMake runs it once.

#include "arg.h"

#include <cstdio>
#include <nlohmann/json.hpp>

int main() {
    common_params  params;
    nlohmann::json options = nlohmann::json::array();
    for (const common_arg & arg : common_params_parser_init(params, LLAMA_EXAMPLE_SERVER).options) {
        std::vector<std::string> names(arg.args.begin(), arg.args.end());
        names.insert(names.end(), arg.args_neg.begin(), arg.args_neg.end());
        options.push_back({
            { "names", names },
            { "n_values", (arg.value_hint != nullptr) + (arg.value_hint_2 != nullptr) },
            { "variable", arg.env ? nlohmann::json(arg.env) : nlohmann::json(nullptr) },
        });
    }
    const nlohmann::json server = { { "has_web_page", bool(HOBBIT_HAS_WEB_PAGE) }, { "options", options } };
    std::puts(server.dump(1).c_str());
    return 0;
}
