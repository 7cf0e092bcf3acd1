# SPDX-License-Identifier: MIT
"""Hugging Face checkpoints, through llama.cpp's own converter in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyhobbit.convert.shards import check_checkpoint
from pyhobbit.convert.write import Progress
from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import TensorInfo
from pyhobbit.model.quantize import type_by_id
from pyhobbit.native.paths import VENDOR_DIR

_CONVERTER = VENDOR_DIR / "convert_hf_to_gguf.py"
_SCRIPT = Path(__file__).with_name("run_converter.py")
_YES_NO = {True: "yes", False: "no"}
_POLL_SECONDS = 0.2
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception)(: .*)?$")
_PROGRESS = re.compile(r"\d+%\|")


def out_type(high: str | None) -> str:
    """The float type to read a checkpoint as: that of the high tier if it is one, f16 if none was named."""
    if high is None:
        return "f16"
    return high.lower() if high.lower() in ("f32", "f16", "bf16") else "auto"


@dataclass(frozen=True)
class Listed:
    """The tensors that the converter will make, without their places.

    has_mtp: the checkpoint may have weights of a draft block.  without_mtp: it has none, though its
    architecture knows one.
    """

    tensors: tuple[TensorInfo, ...]
    has_mtp: bool
    without_mtp: bool


def list_tensors(folder: Path, out_type: str) -> Listed:
    """Reads headers alone.

    Raises HobbitError if the folder is no checkpoint, is incomplete, or llama.cpp does not know its kind.
    """
    if not (folder / "config.json").is_file():
        has_gguf = any(folder.glob("*.gguf"))
        hint = "name a GGUF file in it" if has_gguf else "MODEL is a checkpoint folder or a GGUF file"
        raise HobbitError(f"{folder} has no config.json, so it is no Hugging Face checkpoint: {hint}")
    has_mtp = check_checkpoint(folder)
    listed = json.loads(_run([str(_SCRIPT), str(folder), out_type, _YES_NO[has_mtp]], folder))
    tensors = []
    for entry in listed["tensors"]:
        ggml_type = type_by_id(entry["type_id"])
        if ggml_type is None:
            raise HobbitError(
                f"{folder}: llama.cpp's converter gives {entry['name']!r} a type that ggml does not know"
            )
        tensors.append(TensorInfo(entry["name"], ggml_type, tuple(entry["ne"]), folder, 0))
    if not tensors:
        raise HobbitError(f"{folder} has no weights in it, such as *.safetensors: download the rest of it")
    names = {tensor.name for tensor in tensors}
    # the last norm has several names
    norms = {name for name in names if "norm" in name and not name.startswith("blk.")}
    needs = {"token_embd.weight": names & {"token_embd.weight"}, "output_norm.weight": norms}
    for needed, found in needs.items():
        if not found:
            raise HobbitError(f"{folder} has no weights for {needed}: download the rest of the checkpoint")
    return Listed(tuple(tensors), has_mtp, listed["without_mtp"])


def write_gguf(folder: Path, out_type: str, has_mtp: bool, output: Path, progress: Progress) -> None:
    """Converts the checkpoint to one GGUF. `progress` is called with bytes written. Raises HobbitError."""
    name = output.name.replace("{", "{{").replace("}", "}}")  # the converter takes it as a template
    arguments = [_SCRIPT, folder, out_type, _YES_NO[has_mtp], _CONVERTER, output.with_name(name)]
    _run(list(map(str, arguments)), folder, output, progress)


def _run(
    arguments: Sequence[str], folder: Path, output: Path | None = None, progress: Progress | None = None
) -> str:
    """Runs a Python script of llama.cpp's converter and returns what it printed."""
    if not _CONVERTER.is_file():
        raise HobbitError(f"llama.cpp's converter is missing at {_CONVERTER}: install pyhobbit again")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(VENDOR_DIR), str(VENDOR_DIR / "gguf-py")]))
    environment.pop("NO_LOCAL_GGUF", None)  # would let the converter import another version of gguf
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, *arguments], stdout=printed, stderr=log, env=environment)
        try:
            _wait(process, output, progress)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            log.seek(0)
            raise HobbitError(_reason(folder, log.read().decode(errors="replace")))
        printed.seek(0)
        return printed.read().decode()


def _wait(process: subprocess.Popen[bytes], output: Path | None, progress: Progress | None) -> None:
    done = 0
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            if output and progress and output.exists():
                size = output.stat().st_size
                progress(size - done)
                done = size


def _reason(folder: Path, log: str) -> str:
    """The last exception of the log, with its line of code if it has no text; or else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip(" ^~") and not _PROGRESS.search(line)]
    last = lines[-1] if lines else "it gave no reason"
    for i, line in enumerate(lines):
        if (found := _EXCEPTION.match(line)) is not None:
            last = line if found[1] else f"{line} at {lines[i - 1]}"
    if last.startswith(("ModuleNotFoundError", "ImportError")):
        return f'reading a checkpoint needs more packages ({last}): pip install "pyhobbit[convert]"'
    return f"llama.cpp's converter failed on {folder}: {last}"
