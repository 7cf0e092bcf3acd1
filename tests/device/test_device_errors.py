# SPDX-License-Identifier: MIT
"""Devices that are not there, that are lost, and settings that do not fit them."""

import subprocess
import sys
from pathlib import Path

import lost_server
import models
import on_rpc
import pytest
import rpc_server
from conftest import RunPyhobbit
from logits import RunError


def test_a_device_that_is_not_there_is_an_error_that_names_those_there_are(
    tiny_gguf: Path, run_pyhobbit: RunPyhobbit
) -> None:
    done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 1, "--device", "CUDA7")
    assert done.returncode == 1
    said = "there is no device 'CUDA7', and no other GPU: docs/gpu.md says how to build for one"
    assert said in done.stderr or "there is no device 'CUDA7': choose one of CPU, " in done.stderr


def test_device_memory_wants_a_device_that_has_any(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    for command in (("chat", "-p", "x", "-n", 1), ("inspect", "--no-speed")):
        done = run_pyhobbit(command[0], tiny_gguf, *command[1:], "--device-memory", "64M")
        assert done.returncode == 1
        assert "--device-memory limits GPU memory, and the experts are on the CPU" in done.stderr


def test_a_mode_wants_a_device_that_has_memory_of_its_own(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 1, "--device", "CPU", "--mode", "cooperative")
    assert done.returncode == 1
    assert "--mode divides the experts between CPU and GPU: name a GPU with --device" in done.stderr


def test_computing_early_wants_a_device_and_predictions(
    tiny_gguf: Path, rpc: str, run_pyhobbit: RunPyhobbit
) -> None:
    on_device = ("--rpc", rpc, "--device", "RPC0", "--pools", "8M")
    for options in (), (*on_device, "--mode", "gpu"), (*on_device, "--prefetch", 0):
        done = run_pyhobbit("chat", tiny_gguf, "-p", "x", "-n", 1, "--early", *options)
        assert done.returncode == 1
        assert "--early lets the CPU compute experts that are predicted: name a GPU" in done.stderr
        assert "weights other than experts" not in done.stderr


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
    for endpoint, why in (("127.0.0.1:1", "no RPC server answers at"), ("host", "is not the address of")):
        done = run_pyhobbit("chat", tiny_gguf, *on_rpc.CHAT, "--rpc", endpoint, "--device", "RPC0")
        assert done.returncode > 0
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("device", ["RPC0", "CPU"])  # experts, or all but them
def test_a_server_that_is_lost_is_an_error(tiny_gguf: Path, device: str) -> None:
    with rpc_server.running(models.lib_dir()) as (endpoint, server):
        _assert_losing_is_an_error(tiny_gguf, server, endpoint, endpoint, device)


@pytest.mark.parametrize("n_requests", [0, 2, 4, 8, 16, 28, 48, 100, 200, 300])
def test_a_server_that_is_lost_while_a_model_is_opened_is_an_error(
    tiny_gguf: Path, rpc: str, run_pyhobbit: RunPyhobbit, n_requests: int
) -> None:
    with lost_server.lost_after(rpc, n_requests) as endpoint:
        options = ("--rpc", endpoint, "--device", "RPC0", "--pools", "8M", "--mode", "gpu")
        done = run_pyhobbit("chat", tiny_gguf, *on_rpc.CHAT, *options)
    assert done.returncode == 1, done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("pyhobbit: error: ")
    assert endpoint in error or "RPC0" in error or "lost or broken" in error


def test_one_of_two_servers_that_is_lost_is_an_error(tiny_gguf: Path, rpc: str) -> None:
    with rpc_server.running(models.lib_dir()) as (endpoint, second):
        _assert_losing_is_an_error(tiny_gguf, second, endpoint, f"{rpc},{endpoint}", "RPC0,RPC1")


def _assert_losing_is_an_error(
    model: Path, server: "subprocess.Popen[bytes]", endpoint: str, endpoints: str, device: str
) -> None:
    """endpoint: of the server, among endpoints."""
    options = (*on_rpc.CHAT, "-n", 200, "--pools", "8M", "--device", device)
    command = [sys.executable, "-m", "pyhobbit", "chat", model, "--rpc", endpoints, *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as chat:
        assert chat.stdout
        assert chat.stdout.read(1)
        server.kill()
        _, err = chat.communicate(timeout=120)
    assert chat.returncode == 1, err
    error = err.decode().splitlines()[-1]  # behind a note on the model
    # what is told depends on what was under way
    reasons = (
        f"RPC server {endpoint} does not answer",
        "failed to compute experts",
        "is lost or broken",
    )
    assert any(reason in error for reason in reasons), error
