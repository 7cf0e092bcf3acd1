# SPDX-License-Identifier: MIT
"""Modelled devices report what nothing orders: waits and pins that are left out of our code.

MODELLED_FAULT names those of one run. A changed text is compiled as the build compiles its file, and the
library is linked with it. Nothing changes in the tree or in the environment. Needs the build of `make build`.
"""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import modelled
import models
import pytest
from logits import ROOT, Override, Result, RunError

sys.path.append(str(ROOT / "tests/mutants"))
import overlay

SOURCES = "ggml_ext/src"
SCHEDULER = "vendor/llama.cpp/ggml/src/ggml-backend.cpp"
LIBRARIES = ("libggml-hobbit.so", "libggml-base.so")

IS_FAULT = """
#include <cstdlib>
#include <string>
static bool is_fault(const char * name) {
    const char *      wanted = std::getenv("MODELLED_FAULT");
    const std::string names  = "," + std::string(wanted ? wanted : "") + ",";
    return names.find("," + std::string(name) + ",") != std::string::npos;
}
"""


@dataclass(frozen=True)
class Fault:
    """A text that a file has once, and what stands for it, where is_fault(NAME) says whether it is wanted.

    new: "" leaves the statements of the text out.
    found: words of the report, or of the error, where it shows; "": it is a condition, or part of the fault
    before it.  beside: conditions in which it shows.  size: of experts, see modelled.on.
    """

    name: str
    file: str
    old: str
    new: str = ""
    found: str = ""
    mode: str = "gpu"
    n_devices: int = 1
    gpu_layers: int = 99
    beside: tuple[str, ...] = ()
    size: float = 1
    settings: dict[str, Override] = field(default_factory=dict)


OWN_QUEUES = "experts have queues of their own"
FAULTS = [
    Fault(
        OWN_QUEUES,
        f"{SOURCES}/backend/shared-queues.cpp",
        "                inner.share(other);",
    ),
    Fault(
        "a layer in a queue of its own is not waited for",
        f"{SOURCES}/graph/inner-graph.cpp",
        "        ggml_backend_synchronize(backend_);\n        count(&stats::device_waits);",
        found=r"ADD ffn_moe_out-\d by stream \d+ of device 0 is not ordered behind",
        beside=(OWN_QUEUES,),
    ),
    Fault(
        "the event behind the router's choice is not waited for",
        f"{SOURCES}/graph/inner-graph.cpp",
        "        ggml_backend_event_synchronize(copied_.get());",
        found="the router chose expert -1 of",
        size=modelled.QUANTIZED,
    ),
    Fault(
        "experts that run ahead are not pinned",
        f"{SOURCES}/execute/expert-stream.cpp",
        "        running_.push_back({ id, tier_id::high });",
        "        running_.push_back({ id, tier_id::high });\n"
        "        if (is_fault(NAME)) {\n            unpin_running();\n        }",
        found=r"a copy of .* by stream \d+ of device 0 is not ordered behind MUL_MAT_ID",
        settings={"hobbit.policy": "random", "hobbit.pools": 1 << 20, "hobbit.prefetch": 0},
        size=modelled.QUANTIZED,
    ),
    Fault(
        "experts run ahead before they arrive",
        f"{SOURCES}/io/loader.cpp",
        "{ return s.arrived.has(parts); });\n    return have;",
        "{ return (is_fault(NAME) ? s.requested : s.arrived).has(parts); });\n    return have;",
        found=r"MUL_MAT_ID .* by stream \d+ of device 0 is not ordered behind a copy of",
        settings={"hobbit.prefetch": 2},
        size=modelled.QUANTIZED,
    ),
    Fault(
        "staging memory is used again at once",
        f"{SOURCES}/graph/inner-graph.cpp",
        "    is_running_ = true;\n    count(&stats::device_launches);",
        "    is_running_ = true;\n    count(&stats::device_launches);\n"
        "    if (is_fault(NAME)) {\n        n_staged_ = n_copied_ = 0;\n        numbers_.clear();\n    }",
        found=r"the source of a copy of .* by stream \d+ of device 0 changed before its end",
        mode="cooperative",
    ),
    Fault(
        "experts are computed before they arrive",
        f"{SOURCES}/execute/expert-stream.cpp",
        "{ return cache_.arrived(use->id, use->tier, w.st.parts); };",
        "{ return is_fault(NAME) || cache_.arrived(use->id, use->tier, w.st.parts); };",
        found=r"a copy of .* by stream \d+ of device 0 is not ordered behind MUL_MAT_ID",
    ),
    Fault(
        "an upload is not waited for",
        f"{SOURCES}/io/loader.cpp",
        "    if (stream) {\n        ggml_backend_synchronize(stream.get());",
        "    if (stream && !is_fault(NAME)) {\n        ggml_backend_synchronize(stream.get());",
        found=r"MUL_MAT_ID .* by stream \d+ of device 0 is not ordered behind a copy of",
    ),
    Fault(
        "who waits for the experts' backend waits for nothing",
        f"{SOURCES}/backend/ggml-hobbit.cpp",
        "        ggml_backend_synchronize(shared);",
        found=r"a copy of HOBBIT_CUDA0#ffn_norm-\d.* by thread 0 is not ordered behind",
        gpu_layers=3,
    ),
    Fault(
        "a prediction is not waited for",
        f"{SOURCES}/predict/router-predictor.cpp",
        "    const ggml_status result = ggml_backend_graph_compute(backend, graph_);",
        "    const ggml_status result = is_fault(NAME) ? ggml_backend_graph_compute_async(backend, graph_)\n"
        "                                              : ggml_backend_graph_compute(backend, graph_);",
        found=r"by thread 0 is not ordered behind MUL_MAT node_\d+ by stream",
        beside=(OWN_QUEUES,),
        settings={"hobbit.prefetch": 2},
    ),
    Fault(
        "the scheduler does not wait for other backends",
        f"{SOURCES}/backend/ggml-hobbit.cpp",
        "ctx.others.end(), ggml_backend_synchronize);",
        "is_fault(NAME) ? ctx.others.begin() : ctx.others.end(), ggml_backend_synchronize);",
        found=r"by stream \d+ of device 0 is not ordered behind MUL ffn_norm-\d by stream",
        beside=(OWN_QUEUES,),
    ),
    Fault(
        "the scheduler does not wait for other backends",
        SCHEDULER,
        "        if (split->n_inputs == 0 && prev_backend_id >= 0 &&",
        "        if (split->n_inputs == 0 && !is_fault(NAME) && prev_backend_id >= 0 &&",
    ),
    Fault(
        "the experts' memory is anybody's",
        f"{SOURCES}/backend/shared-queues.cpp",
        "get_queue(each) == backend) {",
        "(get_queue(each) == backend || is_fault(NAME))) {",
        found=r"ADD ffn_moe_out-\d by stream \d+ of device 1 is in memory of another device",
        n_devices=2,
    ),
]


def _compile(file: str, folder: Path) -> tuple[str, Path]:
    """The object's name in the build, and the changed one."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for fault in FAULTS:
        if fault.file == file:
            if text.count(fault.old) != 1:
                raise ValueError(f"{fault.name}: {file} has {text.count(fault.old)} times {fault.old!r}")
            new = fault.new or f"if (!is_fault(NAME)) {{\n{fault.old}\n}}"
            text = text.replace(fault.old, new.replace("NAME", json.dumps(fault.name)))
    changed = folder / Path(file).name
    changed.write_text(IS_FAULT + text, encoding="utf-8")
    command, object_ = overlay.compile_command(ROOT / file)
    command = re.sub(r" -M[DTF]\b( \S+\.[od]\b)?", "", command)
    path = changed.with_suffix(".o")
    command = command.replace(f" -o {object_} ", f" -o {path} ").replace(
        f" -c {ROOT / file}", f" -c {changed}"
    )
    overlay.build(f"{command} -O0 -w")
    return object_, path


@pytest.fixture(scope="module")
def lib_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of libraries with all faults, none of which is there unless it is wanted."""
    folder, built = (tmp_path_factory.mktemp(name) for name in ("faults", "lib"))
    for file in models.lib_dir().iterdir():
        (built / file.name).symlink_to(file)
    files = sorted({fault.file for fault in FAULTS})
    with ThreadPoolExecutor(2) as pool:
        objects = dict(pool.map(lambda file: _compile(file, folder), files))
    for library in LIBRARIES:
        (built / library).unlink()
        overlay.link(f"bin/{library}", objects, built)
    return built


def _run(model: Path, case: Fault, lib_dir: Path | None, fault: str) -> Result:
    settings = f"{modelled.KINDS['CUDA']} devices={case.n_devices} delay_us=1000"
    pools = modelled.on(case.n_devices, settings, case.size) | {"hobbit.mode": case.mode} | case.settings
    model = modelled.quantized() if case.size == modelled.QUANTIZED else model
    return modelled.run(model, settings, pools, gpu_layers=case.gpu_layers, lib_dir=lib_dir, fault=fault)


@pytest.mark.parametrize("case", [each for each in FAULTS if each.found], ids=lambda case: case.name)
def test_a_fault_is_reported(tiny_gguf: Path, lib_dir: Path, case: Fault) -> None:
    try:
        found = "\n".join(
            _run(tiny_gguf, case, lib_dir, ",".join([case.name, *case.beside])).report["errors"]
        )
    except RunError as error:  # the values were wrong, too
        found = str(error)
    assert re.search(case.found, found), found


def test_a_read_of_a_file_under_kernels_is_reported(lib_dir: Path) -> None:
    settings, name = modelled.KINDS["CUDA"] + " one_memory=1", "experts are computed before they arrive"
    for fault in ("", name):
        how = modelled.on(1, settings)
        found = modelled.run(modelled.quantized(), settings, how, gpu_layers=99, lib_dir=lib_dir, fault=fault)
        errors = "\n".join(found.report["errors"])
        assert ("is not ordered behind a read of a file" in errors) == bool(fault), errors


@pytest.mark.parametrize("fault", ["", OWN_QUEUES])
@pytest.mark.parametrize("mode", ["gpu", "cooperative"])
def test_nothing_is_reported_without_one(
    tiny_gguf: Path, lib_dir: Path, on_cpu: Result, mode: str, fault: str
) -> None:
    result = _run(tiny_gguf, Fault("", "", "", mode=mode), lib_dir, fault)
    modelled.assert_clean(result, on_cpu)
    waits_in_all_layers = result.stats["device_waits"] > result.stats["layers_computed"] / 2
    assert waits_in_all_layers == (fault == OWN_QUEUES)
