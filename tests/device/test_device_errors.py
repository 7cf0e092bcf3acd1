# SPDX-License-Identifier: MIT
"""Devices that are not there, and settings that do not fit them."""

from pathlib import Path

import on_rpc
import pytest
from conftest import RunPyhobbit
from logits import RunError


def test_a_device_that_is_not_there_is_an_error_that_names_those_there_are(
    tiny_gguf: Path, run_pyhobbit: RunPyhobbit
) -> None:
    done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 1, "--device", "CUDA7")
    assert done.returncode == 1
    said = "there is no device 'CUDA7', and no other GPU: a driver and make install GPU=vulkan find one"
    assert said in done.stderr or "there is no device 'CUDA7': choose one of CPU, " in done.stderr


def test_another_machines_device_asks_for_its_address(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 1, "--device", "RPC0")
    assert done.returncode == 1
    assert "there is no device 'RPC0': give --rpc HOST:PORT" in done.stderr


def test_device_memory_wants_a_device_that_has_any(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    for command in (("chat", "-p", "x", "-n", 1), ("inspect", "--no-speed")):
        done = run_pyhobbit(command[0], tiny_gguf, *command[1:], "--device-memory", "64M")
        assert done.returncode == 1
        assert "--device-memory limits a GPU's own memory, and the experts are in the host's" in done.stderr


def test_a_mode_wants_a_device_that_has_memory_of_its_own(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 1, "--device", "CPU", "--set", "mode=cooperative")
    assert done.returncode == 1
    assert "mode divides the experts between the CPU and a GPU with memory of its own" in done.stderr


def test_a_bound_on_the_process_and_one_on_its_pools_are_an_error(
    tiny_gguf: Path, run_pyhobbit: RunPyhobbit
) -> None:
    sizes = ("--memory", "1G", "--pools", "8M")
    for device in ((), ("--device", "CPU")):
        done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 1, *sizes, *device)
        assert done.returncode == 1
        assert "--memory limits the whole process and --pools the expert cache alone" in done.stderr


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("RPC0,CPU", "CPU has no memory of its own, as each of several devices must"),
        ("RPC0,RPC0", "--device names RPC0 twice"),
        ("RPC0,CUDA7", "there is no device 'CUDA7': choose one of CPU"),
    ],
)
def test_devices_that_cannot_be_together_are_an_error(
    tiny_gguf: Path, rpc: str, run_pyhobbit: RunPyhobbit, device: str, why: str
) -> None:
    done = run_pyhobbit("chat", tiny_gguf, *on_rpc.CHAT, "--rpc", rpc, "--device", device)
    assert done.returncode == 1
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_too_little_device_memory_is_an_error_that_names_the_least(tiny_gguf: Path, rpc: str) -> None:
    with pytest.raises(
        RunError, match=r"device memory of 1\.0 KiB is too small: the smallest that works is \d+ MiB"
    ):
        on_rpc.run(tiny_gguf, rpc, {"hobbit.device_memory": 1024})


def test_a_server_that_does_not_answer_is_an_error(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    for endpoint, why in (("127.0.0.1:1", "no machine answers at"), ("host", "is not the address of")):
        done = run_pyhobbit("chat", tiny_gguf, *on_rpc.CHAT, "--rpc", endpoint, "--device", "RPC0")
        assert done.returncode > 0
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1
