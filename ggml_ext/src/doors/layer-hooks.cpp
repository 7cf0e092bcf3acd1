// SPDX-License-Identifier: MIT
#include "doors/layer-hooks.h"

namespace hobbit {

std::vector<std::unique_ptr<layer_hooks>> make_hooks(hook_parts parts) {
    std::vector<std::unique_ptr<layer_hooks>> all;
    for (const std::string & name : registered_hooks::names()) {
        parts.name = name;
        if (auto hooks = registered_hooks::make(parts)) {
            all.push_back(std::move(hooks));
        }
    }
    return all;
}

} // namespace hobbit
