// SPDX-License-Identifier: MIT
#include "base/setting-table.h"
#include "base/stats.h"

namespace hobbit {

static status check_early(const setting_values & values, bool is_apart) {
    return is_apart && values.text("hobbit.mode") != "gpu" && values.number("hobbit.prefetch") > 0
               ? status()
               : status::error("hobbit.early lets the CPU compute experts that are predicted: name a GPU with "
                               "hobbit.device, and leave hobbit.mode and hobbit.prefetch at their defaults");
}

[[maybe_unused]] static const bool are_registered[] = {
    register_setting(
        { "hobbit.early", "early", HOBBIT_TYPE_FLAG, 0, 1, "0", nullptr, nullptr, nullptr, false, false, nullptr,
          "Let the CPU compute predicted experts that the GPU lacks one layer early (DAOP). Approximate." },
        check_early),
    register_setting({ "hobbit.early_from", "early_from", HOBBIT_TYPE_COUNT, 0, 1024, "0", nullptr, nullptr, "layers",
                       false, false, nullptr,
                       "With early, the layers before this one are exact (DAOP; the 4 of --paper daop is a guess)." }),
    register_counter("selections_early", "early_selections_total",
                     "Expert selections that the CPU computed a layer early, on that layer's input (approximate)"),
    register_paper(
        { "daop", "a GPU",
          "t1=1 mode=cooperative policy=prompt predictor=router prefetch=1 early=1 early_from=4 degrade=1" }),
};

} // namespace hobbit
