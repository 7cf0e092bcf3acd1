# SPDX-License-Identifier: MIT
"""Mutants that an audit of the tests named, because nothing failed with them: each has a test now."""

from __future__ import annotations

from overlay import Mutant

ACCURACY = "tests/engine/test_prefetch_accuracy.py::test_predictions_are_those_of_the_routers"

LISTED = [
    Mutant(
        "1: no cgroup limits memory",
        "ggml_ext/src/base/system-memory.cpp",
        "    if (limit == UNLIMITED || usage == UNLIMITED) {\n",
        "    if (true) {\n",
        ("test-system-memory",),
    ),
    Mutant(
        "2: a plain model always fits",
        "ggml_ext/src/engine/hobbit-model.cpp",
        "if (index.model_bytes() + index.model_bytes() / 10 < available_memory()) {",
        "if (true) {",
        ("test-hobbit",),
    ),
    Mutant(
        "3: repacked weights are no host memory",
        "patches/llama/llama-hobbit.cpp",
        " || (dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU);",
        " || (dev && false);",
        ("tests/engine/test_memory.py::test_peak_memory_stays_within_the_budget",),
        "libllama.so",
    ),
    Mutant(
        "4a: sigmoid routers are predicted with softmax",
        "patches/llama/llama-hobbit.cpp",
        "return HOBBIT_GATING_SIGMOID;",
        "return HOBBIT_GATING_SOFTMAX;",
        (f"{ACCURACY}[glm4moe]",),
        "libllama.so",
    ),
    Mutant(
        "4b: no selection bias",
        "patches/llama/llama-hobbit.cpp",
        "layer.ffn_gate_inp_b, layer.ffn_exp_probs_b,",
        "layer.ffn_gate_inp_b, nullptr,",
        (f"{ACCURACY}[glm4moe]",),
        "libllama.so",
    ),
    Mutant(
        "4c: no bias of the router",
        "patches/llama/llama-hobbit.cpp",
        "layer.ffn_gate_inp_b, layer.ffn_exp_probs_b,",
        "nullptr, layer.ffn_exp_probs_b,",
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
        "if (!ctx->runner->owns(tensor->name)) {",
        "if (false) {",
        ("tests/native/test_programs.py::test_an_adapter_for_experts_in_the_cache_is_refused",),
        "libggml-hobbit.so",
    ),
    Mutant(
        "7: a restored slot keeps older thresholds",
        "vendor/llama.cpp/tools/server/server-context.cpp",
        "                        slot->prompt.hobbit = server_hobbit_effective(ctx_tgt, {});\n",
        "",
        ("tests/server/test_server_cache.py::test_a_restored_slot_has_the_servers_thresholds",),
        "libllama-server-impl.so",
    ),
    Mutant(
        "8: each counter of the server is its neighbour",
        "patches/server/server-hobbit.cpp",
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
]
