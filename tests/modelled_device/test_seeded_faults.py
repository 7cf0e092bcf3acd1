# SPDX-License-Identifier: MIT
"""Modelled devices report what nothing orders: waits and pins that are left out of our code (faults.py)."""

import re
from pathlib import Path

import modelled
import pytest
from faults import ALL_UPLOADS, FAULTS, OWN_QUEUES, Fault, build
from logits import Result, RunError


@pytest.fixture(scope="module")
def lib_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def least_memory(tiny_gguf: Path) -> int:
    """Bytes."""
    with pytest.raises(RunError) as refused:
        _run(tiny_gguf, Fault("", "", "", settings={"hobbit.memory": 1 << 20}), None, "")
    found = re.search(r"the smallest that works is (\d+) MiB", str(refused.value))
    assert found
    return int(found[1]) << 20


def _run(model: Path, case: Fault, lib_dir: Path | None, fault: str) -> Result:
    settings = f"{modelled.KINDS['CUDA']} devices={case.n_devices} delay_us=1000"
    pools = modelled.on(case.n_devices, settings, case.size) | {"hobbit.mode": case.mode} | case.settings
    model = modelled.quantized() if case.size == modelled.QUANTIZED else model
    return modelled.run(model, settings, pools, gpu_layers=case.gpu_layers, lib_dir=lib_dir, fault=fault)


@pytest.mark.parametrize("case", [each for each in FAULTS if each.found], ids=lambda case: case.name)
def test_a_fault_is_reported(
    tiny_gguf: Path, lib_dir: Path, case: Fault, request: pytest.FixtureRequest
) -> None:
    if case.memory is not None:
        case.settings["hobbit.memory"] = request.getfixturevalue("least_memory") + case.memory
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


@pytest.mark.parametrize("fault", ["", ALL_UPLOADS, OWN_QUEUES])
@pytest.mark.parametrize("mode", ["gpu", "cooperative"])
def test_nothing_is_reported_without_one(
    tiny_gguf: Path, lib_dir: Path, on_cpu: Result, mode: str, fault: str
) -> None:
    result = _run(tiny_gguf, Fault("", "", "", mode=mode), lib_dir, fault)
    modelled.assert_clean(result, on_cpu)
    waits_in_all_layers = result.stats["device_waits"] > result.stats["layers_computed"] / 2
    assert waits_in_all_layers == (fault == OWN_QUEUES)
