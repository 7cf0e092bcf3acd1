# SPDX-License-Identifier: MIT
"""Modelled devices report what nothing orders: waits and pins that are left out of our code (faults.py)."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import faults
import modelled
import pytest
from logits import Override, Result, RunError


@dataclass(frozen=True)
class Case:
    """Where a fault shows, and the words of the report.

    beside: of faults.NO_FAULTS.  memory: bytes above the least budget.  size: of experts, see modelled.on.
    """

    fault: str
    found: str
    mode: str = "gpu"
    n_devices: int = 1
    gpu_layers: int = 99
    beside: tuple[str, ...] = ()
    memory: int | None = None
    size: float = 1
    settings: dict[str, Override] = field(default_factory=dict)


CASES = [
    Case(
        "a layer in a queue of its own is not waited for",
        r"ADD ffn_moe_out-\d by stream \d+ of device 0 is not ordered behind",
        beside=(faults.OWN_QUEUES,),
    ),
    Case(
        "what was read is not waited for",
        r"the target of a copy of ffn_moe_topk-\d by stream \d+ of device 0 is touched by thread 0 before",
        beside=(faults.OWN_QUEUES,),
    ),
    Case(
        "the event behind the router's choice is not waited for",
        r"the target of a copy of ffn_moe_topk-\d by stream \d+ of device 0 is touched by thread 0 before",
        size=modelled.QUANTIZED,
    ),
    Case(
        "experts that run ahead are not pinned",
        r"a copy of .* by stream \d+ of device 0 is not ordered behind MUL_MAT_ID",
        settings={"hobbit.policy": "random", "hobbit.pools": 1 << 20, "hobbit.prefetch": 0},
        size=modelled.QUANTIZED,
    ),
    Case(
        "experts run ahead before they arrive",
        r"MUL_MAT_ID .* by stream \d+ of device 0 is not ordered behind a copy of",
        settings={"hobbit.prefetch": 2},
        size=modelled.QUANTIZED,
    ),
    Case(
        "staging memory is used again at once",
        r"the source of a copy of .* by stream \d+ of device 0 changed before its end",
        mode="cooperative",
    ),
    Case(
        "experts that run are not pinned",
        r"a copy of .* by stream \d+ of device 0 is not ordered behind MUL_MAT_ID",
        mode="cooperative",
        beside=(faults.ALL_UPLOADS,),
        settings={"hobbit.policy": "random", "hobbit.pools": 2 << 20, "hobbit.prefetch": 0},
    ),
    Case(
        "experts are computed before they arrive",
        r"a copy of .* by stream \d+ of device 0 is not ordered behind MUL_MAT_ID",
    ),
    Case(
        "an upload is not waited for",
        r"MUL_MAT_ID .* by stream \d+ of device 0 is not ordered behind a copy of",
    ),
    Case(
        "a slot of the host is not pinned while it is uploaded",
        r"the source of a copy of .* by stream \d+ of device 0 changed before its end",
        memory=2 << 20,
    ),
    Case(
        "who waits for the experts' backend waits for nothing",
        r"a copy of HOBBIT_CUDA0#ffn_norm-\d.* by thread 0 is not ordered behind",
        gpu_layers=3,
    ),
    Case(
        "a layer ends without a wait in any queue",
        r"ADD ffn_moe_out-\d by stream \d+ of device 0 is not ordered behind",
        beside=(faults.OWN_QUEUES,),
    ),
    Case(
        "a prediction is not waited for",
        r"by thread 0 is not ordered behind MUL_MAT node_\d+ by stream",
        beside=(faults.OWN_QUEUES,),
        settings={"hobbit.prefetch": 2},
    ),
    Case(
        "the scheduler does not wait for other backends",
        r"by stream \d+ of device 0 is not ordered behind MUL ffn_norm-\d by stream",
        beside=(faults.OWN_QUEUES,),
    ),
    Case(
        "the experts' memory is anybody's",
        r"ADD ffn_moe_out-\d by stream \d+ of device 1 is in memory of another device",
        n_devices=2,
    ),
]


@pytest.fixture(scope="module")
def lib_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.build(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def least_memory(tiny_gguf: Path) -> int:
    """Bytes."""
    with pytest.raises(RunError) as refused:
        _run(tiny_gguf, Case("", "", settings={"hobbit.memory": 1 << 20}), None, "")
    found = re.search(r"the smallest that works is (\d+) MiB", str(refused.value))
    assert found
    return int(found[1]) << 20


def _run(model: Path, case: Case, lib_dir: Path | None, fault: str) -> Result:
    settings = f"{modelled.KINDS['CUDA']} devices={case.n_devices} delay_us=1000"
    pools = modelled.on(case.n_devices, settings, case.size) | {"hobbit.mode": case.mode} | case.settings
    model = modelled.quantized() if case.size == modelled.QUANTIZED else model
    return modelled.run(model, settings, pools, gpu_layers=case.gpu_layers, lib_dir=lib_dir, fault=fault)


def test_every_fault_has_a_case() -> None:
    assert {fault.name for fault in faults.FAULTS} == {case.fault for case in CASES} | faults.NO_FAULTS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_a_fault_is_reported(
    tiny_gguf: Path, lib_dir: Path, case: Case, request: pytest.FixtureRequest
) -> None:
    if case.memory is not None:
        case.settings["hobbit.memory"] = request.getfixturevalue("least_memory") + case.memory
    try:
        found = "\n".join(
            _run(tiny_gguf, case, lib_dir, ",".join([case.fault, *case.beside])).report["errors"]
        )
    except RunError as error:  # the values were wrong, too
        found = "\n".join(line for line in str(error).splitlines() if line.startswith("modelled device: "))
    assert re.search(case.found, found), found


@pytest.mark.parametrize("fault", ["", *sorted(faults.NO_FAULTS)])
@pytest.mark.parametrize("mode", ["gpu", "cooperative"])
def test_nothing_is_reported_without_one(
    tiny_gguf: Path, lib_dir: Path, on_cpu: Result, mode: str, fault: str
) -> None:
    result = _run(tiny_gguf, Case("", "", mode), lib_dir, fault)
    modelled.assert_clean(result, on_cpu)
    waits_in_all_layers = result.stats["device_waits"] > result.stats["layers_computed"] / 2
    assert waits_in_all_layers == (fault == faults.OWN_QUEUES)
