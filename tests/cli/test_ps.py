# SPDX-License-Identifier: MIT
"""The list of running commands."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import RunPyhobbit
from servers import wait_until

from pyhobbit.cli import ps
from pyhobbit.cli.main import main
from pyhobbit.cli.ps import Running, _address, _command, _model
from pyhobbit.cli.server_flags import SERVER


def test_a_running_command_is_listed(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    """A chat that waits for its prompt on standard input; its model has to exist."""
    command = [sys.executable, "-m", "pyhobbit", "chat", str(tiny_gguf), "--file", "-"]

    def listed() -> dict[int, dict[str, Any]]:
        return {each["pid"]: each for each in json.loads(run_pyhobbit("ps", "--json").stdout)}

    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: listed().get(process.pid, {"memory": 0})["memory"] > 1 << 20)  # it has begun
        found = listed()[process.pid]
        assert (found["command"], found["model"]) == ("chat", str(tiny_gguf))
        process.kill()
    assert process.pid not in listed()


def test_commands_are_known_by_their_arguments() -> None:
    assert _command(["python", "/bin/pyhobbit", "run", "a/b:Q4_0"]) == ("run", ["a/b:Q4_0"])
    assert _command(["python", "-m", "pyhobbit", "--help"])[0] is None
    assert _command(["vim", "pyhobbit"])[0] is None
    assert _command([str(SERVER), "-m", "x.gguf"]) == ("serve", ["-m", "x.gguf"])
    assert _model(["-m", "x.gguf", "--port", "1"]) == "x.gguf"
    assert _model(["--memory", "8G", "x.gguf"]) == "x.gguf"
    assert _model(["a/b:Q4_0", "-p", "x"]) == "a/b:Q4_0"
    assert _model(["--set", "t1=1"]) == ""
    assert _model(["--models-preset", "/proc/self/fd/3"]) == "several models"


def test_a_server_is_listed_with_its_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Running(7, "serve", "several models", 3 << 20, "127.0.0.1:9"), Running(8, "chat", "m", 1 << 20)]
    monkeypatch.setattr(ps, "running", lambda: found)
    assert main(["ps"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "      7  serve        3.0 MiB  127.0.0.1:9      several models",
        "      8  chat         1.0 MiB                   m",
    ]


def test_the_address_of_a_server_is_one_that_clients_reach(tmp_path: Path) -> None:
    def address(*arguments: str, **variables: str) -> str:
        text = "".join(f"{name}={value}\0" for name, value in variables.items())
        (tmp_path / "environ").write_text(text)
        return _address("serve", list(arguments), tmp_path)

    assert address("-m", "x.gguf") == "127.0.0.1:8080"
    assert address("--host", "0.0.0.0", "--port", "9") == "127.0.0.1:9"
    assert address("--host", "::") == "[::1]:8080"
    assert address("--host", "localhost,::1") == "127.0.0.1:8080"
    assert address("--host", "/run/x.sock") == address("--port", "0") == ""
    assert address(LLAMA_ARG_HOST="0.0.0.0", LLAMA_ARG_PORT="9") == "127.0.0.1:9"
    assert address("--port", "8", LLAMA_ARG_PORT="9") == "127.0.0.1:8"
    assert address(LLAMA_SERVER_ROUTER_PORT="1") == ""  # a model's, behind the server of a folder
