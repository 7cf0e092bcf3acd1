# SPDX-License-Identifier: MIT
"""Every command of docs/tutorial.md, on the tiny model and a Hugging Face Hub on this machine."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
from fake_hub import Hub, serving
from servers import running

PAGE = (models.ROOT / "docs" / "tutorial.md").read_text("utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
INSTALLATION = ["make install", ". .venv/bin/activate"]
# For a model that is a thousandth of the page's.
SMALLER = {"--memory 11G": "--memory 160M", "-n 64": "-n 8"}
NAME, QUANT = "Qwen/Qwen3-30B-A3B-GGUF", "Q4_K_M"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A folder with a text in it, and the environment in which the commands run there."""
    shutil.copy(models.TINY / "heldout.txt", tmp_path / "my.txt")
    files = {f"Qwen3-30B-A3B-{QUANT}.gguf": models.tiny_experts("q4_k").read_bytes()}
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    program = bin_folder / "pyhobbit"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pyhobbit "$@"\n')
    program.chmod(0o755)
    with serving(Hub({NAME: files})) as hub:
        own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hub")}
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        yield {**os.environ, **own, "PATH": path, "PWD": str(tmp_path)}


def _run(command: str, environment: dict[str, str]) -> str:
    for large, small in SMALLER.items():
        command = command.replace(large, small)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=environment["PWD"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout + done.stderr


def _serve(command: str, environment: dict[str, str]) -> str:
    words = shlex.split(command.removesuffix(" --port 8080"))
    log = Path(environment["PWD"]) / "log"
    here = ["env", "-C", environment["PWD"], f"PATH={environment['PATH']}"]
    with running([*here, *words], log) as server:
        assert [model["id"] for model in server.request("/v1/models").json["data"]] == ["qwen3"]
    return log.read_text()


def test_the_installation_is_that_of_the_makefile() -> None:
    assert COMMANDS[:2] == INSTALLATION
    done = subprocess.run(["make", "-n", "install"], cwd=models.ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_command_does_what_the_page_says(desk: dict[str, str]) -> None:
    printed = []
    for command in COMMANDS[2:]:
        run = _serve if command.startswith("pyhobbit serve") else _run
        printed.append((command, run(command, desk)))
    folder = Path(desk["PWD"])
    of = {command.split()[1] for command, _ in printed if command.startswith("pyhobbit")}
    assert of == {"list", "inspect", "chat", "config", "convert", "calibrate", "serve", "rm"}
    (listed,) = (output for command, output in printed if command == "pyhobbit list")
    assert f"{NAME}:{QUANT}" in listed
    for name in ("qwen3.toml", "qwen3.hobbit.gguf", "qwen3.calibration.gguf"):
        assert f"`{name}`" in PAGE
        assert (folder / name).is_file()
    configs = [output for command, output in printed if command == "pyhobbit config qwen3.gguf"]
    assert len(configs) == 2
    assert all("options (qwen3.toml)" in output for output in configs)
    assert ["calibration (qwen3.calibration.gguf)" in output for output in configs] == [False, True]
    (converted,) = (output for command, output in printed if " convert " in command)
    assert "pyhobbit calibrate qwen3.gguf" in converted
    (served,) = (output for command, output in printed if " serve " in command)
    # the last one where the calibration was not faster
    row = r"^pyhobbit: options +qwen3.toml sets temp, memory(, quality)?$"
    assert re.search(row, served, re.MULTILINE), served
    assert not (folder / "qwen3.gguf").exists()  # a link to nothing, now that the download is deleted
