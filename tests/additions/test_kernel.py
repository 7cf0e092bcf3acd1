# SPDX-License-Identifier: MIT
"""A kernel is added by its file alone, and serves the command line, requests and Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import models
import pytest
from servers import PROMPT, serving

pytestmark = [pytest.mark.model, pytest.mark.slow]

ADDED = Path(__file__).parent / "kernel"
PARTS = ("CMakeLists.txt", "cmake", "ggml_ext", "llama_ext", "patches", "vendor")
SAID = "the added kernel multiplies"
CHAT = ("-m", "pyhobbit", "chat", "-p", PROMPT, "-n", "8", "--temp", "0", "--pools", "6M")
PYTHON = """
import sys
from pyhobbit import Hobbit
model = Hobbit(sys.argv[1], pools="6M", verbose=False)
print(model(sys.argv[2], max_tokens=8, temperature=0)["choices"][0]["text"])
"""


@pytest.fixture(scope="module")
def model() -> Path:
    return models.tiny_experts("q5_0")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CPU's library, built from a copy of the sources into which the kernel's folder was copied."""
    tree = tmp_path_factory.mktemp("tree")
    for part in PARTS:
        source = models.ROOT / part
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tree / part)
    for file in ADDED.iterdir():
        assert not (tree / "llama_ext/cpu" / file.name).exists()  # nothing else is touched
        shutil.copy(file, tree / "llama_ext/cpu")
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": tools, "CC": "gcc", "CXX": "g++"}  # ccache goes by these names
    build = tree / "build/release"
    options = ("-G", "Ninja", "-DHOBBIT_WEB_PAGE=OFF", f"-DPython_EXECUTABLE={sys.executable}")
    for command in (["-S", tree, "-B", build, *options], ["--build", build, "--target", "ggml-cpu"]):
        subprocess.run(["cmake", *command], env=environment, check=True, stdout=subprocess.DEVNULL)
    return build / "bin/libggml-cpu.so"


def _run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


def test_the_command_line_uses_it(model: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _run(*CHAT, model)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    after = _run(*CHAT, model)
    assert SAID not in before.stderr
    assert SAID in after.stderr
    assert after.stdout == before.stdout


def test_a_request_uses_it(
    model: Path, library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with serving(model, tmp_path / "log", "--pools", "6M") as server:
        assert server.complete(n=8)
        assert SAID in server.log.read_text()


def test_the_class_uses_it(model: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(library))
    done = _run("-c", PYTHON, model, PROMPT)
    assert done.stdout.strip()
    assert SAID in done.stderr
