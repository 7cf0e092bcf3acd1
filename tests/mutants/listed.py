# SPDX-License-Identifier: MIT
"""Mutants that an audit of the tests named, because nothing failed with them: each has a test now.

From 11 on they are of what the audit found untested.
"""

from __future__ import annotations

from overlay import Mutant

SCALES = "tests/device/test_device.py::test_experts_with_scales_are_the_devices_alone"
ACCURACY = "tests/engine/test_prefetch_accuracy.py::test_predictions_are_those_of_the_routers"

LISTED = [
    Mutant(
        "1: no cgroup limits memory",
        "ggml_ext/src/base/system-memory.cpp",
        "    if (most == UNLIMITED || usage == UNLIMITED) {\n",
        "    if (true) {\n",
        ("test-system-memory",),
    ),
    Mutant(
        "2: a plain model always fits",
        "ggml_ext/src/engine/hobbit-model.cpp",
        "if (index.model_bytes() + index.model_bytes() / 10 < hobbit_available_memory()) {",
        "if (true) {",
        ("test-hobbit",),
    ),
    Mutant(
        "3: repacked weights are no host memory",
        "llama_ext/plan/llama-plan.cpp",
        " || type == GGML_BACKEND_DEVICE_TYPE_CPU ||",
        " || false ||",
        ("tests/engine/test_memory.py::test_peak_memory_stays_within_the_budget",),
        "libllama.so",
    ),
    Mutant(
        "4a: sigmoid routers are predicted with softmax",
        "llama_ext/bridge/llama-hobbit.cpp",
        "return HOBBIT_GATING_SIGMOID;",
        "return HOBBIT_GATING_SOFTMAX;",
        (f"{ACCURACY}[glm4moe]",),
        "libllama.so",
    ),
    Mutant(
        "4b: no selection bias",
        "llama_ext/bridge/llama-hobbit.cpp",
        "layer.ffn_exp_probs_b, llama_hobbit_gating",
        "nullptr, llama_hobbit_gating",
        (f"{ACCURACY}[glm4moe]",),
        "libllama.so",
    ),
    Mutant(
        "4c: no bias of the router",
        "llama_ext/bridge/llama-hobbit.cpp",
        "layer.ffn_gate_inp,    layer.ffn_gate_inp_b,",
        "layer.ffn_gate_inp, nullptr,",
        (f"{ACCURACY}[gpt-oss]",),
        "libllama.so",
    ),
    Mutant(
        "5: llama-quantize takes a file with tiers",
        "vendor/llama.cpp/src/llama-quant.cpp",
        "    llama_hobbit_refuse_tiers(ml);\n",
        "",
        ("tests/native/test_programs.py::test_a_file_with_tiers_is_not_quantized",),
        "libllama.so",
    ),
    Mutant(
        "6: an adapter on cached experts is taken",
        "ggml_ext/src/backend/ggml-hobbit.cpp",
        "if (!runner_of(buffer)->owns(tensor->name)) {",
        "if (false) {",
        ("tests/native/test_programs.py::test_an_adapter_for_experts_in_the_cache_is_refused",),
        "libggml-hobbit.so",
    ),
    Mutant(
        "7: a restored slot keeps older thresholds",
        "llama_ext/server/server-slots.h",
        "            slot->prompt.hobbit = usual();\n",
        "",
        ("tests/server/test_server_cache.py::test_a_restored_slot_has_the_servers_thresholds",),
        "libllama-server-impl.so",
    ),
    Mutant(
        "8: each counter of the server is its neighbour",
        "llama_ext/server/server-report.cpp",
        "json(uint64_t(counters[n]))",
        "json(uint64_t(counters[n > 0 ? n - 1 : 0]))",
        ("tests/server/test_server_cache.py::test_counters_of_a_server_add_up",),
        "libllama-server-impl.so",
    ),
    Mutant(
        "9: prefetch asks for the server's precision, not the request's",
        "ggml_ext/src/predict/prefetcher.cpp",
        "thresholds_.highest(batch_)",
        "thresholds_.highest({})",
        ("test-prefetcher",),
    ),
    Mutant(
        "10a: a signal during a read is an error",
        "ggml_ext/src/io/file-reader.cpp",
        "if (errno != EINTR) {",
        "if (true) {",
        ("test-file-faults",),
    ),
    Mutant(
        "10b: direct I/O that is refused late is an error",
        "ggml_ext/src/io/file-reader.cpp",
        "if (errno == EINVAL && direct) {\n            // accepted",
        "if (false) {\n            // accepted",
        ("test-file-faults",),
    ),
    Mutant(
        "10c: experts stay in the page cache",
        "ggml_ext/src/io/file-reader.cpp",
        "    if (!file.direct) {\n",
        "    if (false) {\n",
        ("test-file-faults",),
    ),
    Mutant(
        "11: a request's own thresholds are not heard",
        "ggml_ext/src/execute/moe-executor.cpp",
        "const auto  thresholds = run_.thresholds.of(layer_.rows);",
        "const std::vector<rule_numbers> thresholds(layer_.rows.size(), run_.thresholds.highest({}));",
        ("tests/server/test_server_cache.py::test_a_requests_thresholds_hold_beside_prefetch",),
        "libggml-hobbit.so",
    ),
    Mutant(
        "12: /hobbit of several models is nobody's",
        "llama_ext/server/server-report.cpp",
        "is_router ? routes.get_slots : get_hobbit",
        "get_hobbit",
        ("tests/server/test_server_life.py::test_each_model_of_a_folder_has_its_own_counters",),
        "libllama-server-impl.so",
    ),
    Mutant(
        "13a: the CPU takes a share beside scales",
        "ggml_ext/src/offload/cpu-rows.cpp",
        "        if (!ok) {\n            return false;",
        "        if (false) {\n            return false;",
        (f"{SCALES}[cooperative-0]",),
        "libggml-hobbit.so",
    ),
    Mutant(
        "13b: scales are looked up elsewhere",
        "ggml_ext/src/backend/claimed-operations.cpp",
        "    if (is_scale_lookup(op)) {\n        return true;",
        "    if (false) {\n        return true;",
        (f"{SCALES}[cooperative-0]",),
        "libggml-hobbit.so",
    ),
    Mutant(
        "14: a model asked to be cached is not",
        "ggml_ext/src/engine/hobbit-model.cpp",
        "= opened->settings_.asked();",
        "= false;",
        ("tests/native/test_programs.py::test_llama_imatrix_counts_as_stock",),
        "libggml-hobbit.so",
    ),
    Mutant(
        "15: waits are not counted",
        "ggml_ext/src/io/loader.cpp",
        "stats_.stall_ns += std::chrono",
        "stats_.stall_ns += 0 * std::chrono",
        ("tests/faults/test_waits.py",),
        "libggml-hobbit.so",
    ),
    Mutant(
        "16: one thread's reads are the disk's speed",
        "ggml_ext/src/io/machine-speed.cpp",
        "        sum += n_bytes;",
        "        sum = n_bytes;",
        ("tests/inspect/test_speed.py::test_the_disk_is_measured_on_the_file",),
        "libggml-hobbit.so",
    ),
    Mutant(
        "17a: waits are part of an estimate's computing",
        "pyhobbit/inspect/speed.py",
        "step.decode_s - step.cache.stall_s",
        "step.decode_s",
        ("tests/inspect/test_speed.py::test_a_sample_is_computed_from_the_counters",),
    ),
    Mutant(
        "18: a converted file's name may come before its bytes",
        "pyhobbit/native/files.py",
        "            os.fsync(file.fileno())\n        if replaces:",
        "            pass\n        if replaces:",
        ("tests/convert/test_convert.py::test_a_file_is_on_the_disk_before_it_has_its_name",),
    ),
    Mutant(
        "19: pools are of small pages",
        "llama_ext/base/ggml-hooks.h",
        "    if (size >= 4 << 20) {",
        "    if (false) {",
        ("test-slot-memory",),
    ),
]
