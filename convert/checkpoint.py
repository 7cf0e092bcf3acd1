# SPDX-License-Identifier: MIT
"""Hugging Face checkpoints, through llama.cpp's own converter in a process of its own."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from pyhobbit.convert.shards import check_checkpoint
from pyhobbit.convert.write import Progress
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import MISTRALS_OWN
from pyhobbit.model.gguf_file import TensorInfo, parse_head
from pyhobbit.model.loading import check_loads
from pyhobbit.model.names import check_quantised
from pyhobbit.native.paths import VENDOR_DIR

_CONVERTER = VENDOR_DIR / "convert_hf_to_gguf.py"
_SCRIPT = Path(__file__).with_name("run_converter.py")
_YES_NO = {True: "yes", False: "no"}
_POLL_SECONDS = 0.2
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception)(: .*)?$")
_PROGRESS = re.compile(r"\d+%\|")
_ANY_SIZE = 1 << 62
# Sentences by words of the converter.
_REASONS = {
    "pre-tokenizer was not recognized": "{} has a tokenizer that only a newer pyhobbit may know",
    "Unprocessed experts": "{} lacks the weights of an expert: download the rest of the checkpoint",
    "backend tokenizer": "{} has no tokenizer.json or tokenizer.model that can be read: download it",
}


def out_type(high: str | None) -> str:
    """The float type to read a checkpoint as: that of the high tier if it is one, f16 if none was named."""
    if high is None:
        return "f16"
    return high.lower() if high.lower() in ("f32", "f16", "bf16") else "auto"


class Listed(NamedTuple):
    """The tensors to be, without places. has_mtp: a draft block may be."""

    tensors: tuple[TensorInfo, ...]
    has_mtp: bool


def list_tensors(folder: Path, out_type: str) -> Listed:
    """Makes the header that the converter would, which llama.cpp has to load. Raises HobbitError.

    Standard error tells of a known draft block that is not there.
    """
    if not (folder / "config.json").is_file():
        if (folder / "params.json").is_file():
            raise HobbitError(MISTRALS_OWN.format(folder))
        has_gguf = any(folder.glob("*.gguf"))
        hint = "name a GGUF file in it" if has_gguf else "MODEL is a checkpoint folder or a GGUF file"
        raise HobbitError(f"{folder} has no config.json, so it is no Hugging Face checkpoint: {hint}")
    has_mtp = check_checkpoint(folder)
    with tempfile.TemporaryDirectory() as place:
        header = Path(place) / "header.gguf"
        printed = _run(folder, out_type, has_mtp, header)
        found = parse_head(header, header.read_bytes(), _ANY_SIZE)
        tensors = found.tensors if found is not None else ()
        if not tensors:
            raise HobbitError(
                f"{folder} has no weights in it, such as *.safetensors: download the rest of it"
            )
        os.truncate(header, tensors[-1].offset + tensors[-1].nbytes)
        check_loads(header, folder, "download the rest of the checkpoint")
    if printed.startswith("yes"):
        lacks = "has no weights of a draft block (MTP): converted without"
        print(f"note: {folder} {lacks}", file=sys.stderr)
    return Listed(tensors, has_mtp)


def write_gguf(folder: Path, out_type: str, has_mtp: bool, output: Path, progress: Progress) -> None:
    """Converts the checkpoint to one GGUF. `progress` is called with bytes written. Raises HobbitError."""
    name = output.name.replace("{", "{{").replace("}", "}}")  # the converter takes it as a template
    _run(folder, out_type, has_mtp, output.with_name(name), output, progress)


def _run(
    folder: Path,
    out_type: str,
    has_mtp: bool,
    named: Path,
    output: Path | None = None,
    progress: Progress | None = None,
) -> str:
    """Gives what llama.cpp's converter prints, for the header alone without `output`. Raises HobbitError."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(VENDOR_DIR), str(VENDOR_DIR / "gguf-py")]))
    environment.pop("NO_LOCAL_GGUF", None)  # would let the converter import another version of gguf
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as log:
        arguments = [str(_SCRIPT), str(folder), out_type, _YES_NO[has_mtp], str(_CONVERTER), str(named)]
        arguments += ["header"] if output is None else []
        process = subprocess.Popen([sys.executable, *arguments], stdout=printed, stderr=log, env=environment)
        try:
            _wait(process, output, progress)
        finally:
            process.kill()
            process.wait()
        printed.seek(0)
        log.seek(0)
        answer, said = (each.read().decode(errors="replace") for each in (printed, log))
        if process.returncode:
            raise HobbitError(_reason(folder, said))
        return answer


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
    """The last exception of the log, with its line of code if it has no text; or else the last line.

    Raises HobbitError where the checkpoint is quantised already.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip(" ^~") and not _PROGRESS.search(line)]
    last = lines[-1] if lines else "it gave no reason"
    for i, line in enumerate(lines):
        if (found := _EXCEPTION.match(line)) is not None:
            last = line if found[1] else f"{line} at {lines[i - 1]}"
    if last.startswith(("ModuleNotFoundError", "ImportError")):
        return f'reading a checkpoint needs more packages ({last}): pip install "pyhobbit[convert]"'
    check_quantised(folder, folder / "config.json", last)
    known = next((text for said, text in _REASONS.items() if said in last), None)
    of = "see its config.json and tokenizer.json"
    return known.format(folder) if known else f"llama.cpp's converter failed on {folder}, {of}: {last}"
