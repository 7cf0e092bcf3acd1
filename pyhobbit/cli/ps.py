# SPDX-License-Identifier: MIT
"""Lists the running commands of pyhobbit with their model and memory."""

import argparse
import contextlib
import json
import re
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from pyhobbit.cli.server_flags import SERVER
from pyhobbit.settings.config import format_size

_VERBS = ("bench", "calibrate", "chat", "convert", "inspect", "run", "serve", "show")


@dataclass(frozen=True)
class Running:
    """A process. memory: bytes resident.  model: as given, or "".  address: HOST:PORT of a server."""

    pid: int
    command: str
    model: str
    memory: int
    address: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    found = running()
    if args.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    elif found:
        rows: list[tuple[str | int, ...]] = [("PID", "COMMAND", "MEMORY", "ADDRESS", "MODEL")]
        rows += [(of.pid, of.command, format_size(of.memory), of.address, of.model) for of in found]
        for pid, command, memory, address, model in rows:
            print(f"{pid:>7}  {command:9}  {memory:>9}  {address:<15}  {model}")
    else:
        print("no command of pyhobbit is running")
    return 0


def running() -> list[Running]:
    """All of this machine that this user may see."""
    found = (_process(folder) for folder in Path("/proc").iterdir() if folder.name.isdecimal())
    return sorted(filter(None, found), key=lambda each: each.pid)


def _process(folder: Path) -> Running | None:
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        status = (folder / "status").read_text(errors="replace")
    except OSError:  # it has ended, or is somebody else's
        return None
    if "VmRSS:" not in status:  # a thread of the kernel, or a process that ends
        return None
    command, arguments = _command(words)
    if command is None:
        return None
    memory = int(status.split("VmRSS:")[1].split()[0]) * 1024
    return Running(int(folder.name), command, _model(arguments), memory, _address(command, arguments, folder))


def _address(command: str, arguments: list[str], folder: Path) -> str:
    given = {"LLAMA_ARG_HOST": "127.0.0.1", "LLAMA_ARG_PORT": "8080"}
    with contextlib.suppress(OSError):  # somebody else's
        text = (folder / "environ").read_text(errors="replace")
        given |= (each.partition("=")[::2] for each in text.split("\0"))
    if command != "serve" or "LLAMA_SERVER_ROUTER_PORT" in given:
        return ""
    given |= pairwise(arguments)
    host = given.get("--host", given["LLAMA_ARG_HOST"]).split(",")[0]
    host = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(host, host)
    port = given.get("--port", given["LLAMA_ARG_PORT"])
    return "" if host.endswith(".sock") or port == "0" else f"{f'[{host}]' if ':' in host else host}:{port}"


def _command(words: list[str]) -> tuple[str | None, list[str]]:
    """The verb and what follows it; serve has become llama-server."""
    if words[:1] == [str(SERVER)]:
        return "serve", words[1:]
    for n, word in enumerate(words[:-1]):
        is_program = Path(word).name == "pyhobbit" or words[max(n - 1, 0) : n + 1] == ["-m", "pyhobbit"]
        if is_program and words[n + 1] in _VERBS:
            return words[n + 1], words[n + 2 :]
    return None, []


def _model(arguments: list[str]) -> str:
    named = [after for before, after in pairwise(arguments) if before in ("-m", "-hf")]
    named += ["several models"] if {"--models-dir", "--models-preset"}.intersection(arguments) else []
    files = [each for each in arguments if each.lower().endswith(".gguf")]
    first = [each for each in arguments[:1] if not each.startswith("-")]
    model = next(iter([*named, *files, *first]), "")
    # a path in the cache of huggingface_hub
    return re.sub("^/.*/models--([^/]+)--([^/]+)/snapshots/[^/]+/", r"\1/\2:", model)
