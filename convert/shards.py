# SPDX-License-Identifier: MIT
"""Looks at a checkpoint's files before it is converted: the absent, the cut, and Git LFS pointers."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyhobbit.errors import HobbitError

_POINTER = b"version https://git-lfs"
_POINTER_BYTES = 1024  # at most
_READ = (".json", ".model", ".txt", ".tiktoken", ".jinja")  # the converter reads them beside the weights
_WEIGHTS = ("model*.safetensors", "consolidated*.safetensors", "pytorch_model*.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_NUMBERED = re.compile(r"(.+-)(\d+)(-of-)(\d+)(\.\w+)")
_LAYER = re.compile(r"(?:^|model\.|transformer\.)layers\.(\d+)\.")
_SENSES = re.compile("vision|visual|audio")


def check_checkpoint(folder: Path) -> bool:
    """Tells if the checkpoint may have the weights of a draft block (MTP).

    Raises HobbitError that names the first file that is absent or incomplete, the tensor or the layer.
    """
    config = _read_json(folder / "config.json")
    weight_map = _weight_map(folder)
    parts = list(_parts(folder, weight_map))
    for path in (*parts, *(each for each in sorted(folder.iterdir()) if each.suffix in _READ)):
        if not path.is_file():
            raise HobbitError(f"a file of the checkpoint is missing: {path}; download it")
        _check_no_pointer(path)
    names = {name for path in parts if path.suffix == ".safetensors" for name in _safetensors_names(path)}
    for name, part in weight_map.items():
        if names and name not in names:
            raise HobbitError(f"{folder / part} lacks the tensor {name!r}: download it again")
    n_layers = (config.get("text_config") or config).get("num_hidden_layers") or 0
    layers = {int(found[1]) for name in names if (found := _LAYER.search(name)) and not _SENSES.search(name)}
    if layers and (absent := sorted(set(range(n_layers)) - layers)):
        raise HobbitError(
            f"{folder} has no weights of layer {absent[0]}: download the rest of the checkpoint"
        )
    has_mtp = any("mtp" in name or "nextn" in name for name in names) or max(layers, default=0) >= n_layers
    return has_mtp or not names


def _weight_map(folder: Path) -> dict[str, str]:
    """File names by tensor; empty without an index."""
    for name in _INDICES:
        if (folder / name).is_file():
            found = _read_json(folder / name).get("weight_map")
            if not isinstance(found, dict):
                raise HobbitError(f"{folder / name} has no weight_map: download it again")
            return found
    return {}


def _parts(folder: Path, weight_map: dict[str, str]) -> Iterator[Path]:
    """The files with weights, those that their names announce included."""
    if weight_map:
        yield from (folder / name for name in sorted(set(weight_map.values())))
        return
    found = next((each for pattern in _WEIGHTS if (each := sorted(folder.glob(pattern)))), [])
    announced = set(found)
    for numbered in filter(None, (_NUMBERED.fullmatch(path.name) for path in found)):
        start, number, of, count, end = numbered.groups()
        announced |= {folder / f"{start}{i:0{len(number)}}{of}{count}{end}" for i in range(1, int(count) + 1)}
    yield from sorted(announced)


def _check_no_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER and path.stat().st_size <= _POINTER_BYTES:
            raise HobbitError(
                f"{path} is a Git LFS pointer, not the file itself: run git lfs pull in {path.parent}, or "
                "download it"
            )


def _safetensors_names(path: Path) -> set[str]:
    """Raises HobbitError if the file ends before its tensors do."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        n_header = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        data = file.read(n_header) if n_header <= size else b""
    try:
        header: dict[str, Any] = json.loads(data)
        header.pop("__metadata__", None)
        end = 8 + n_header + max((each["data_offsets"][1] for each in header.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise HobbitError(f"{path} is incomplete or damaged in its header: download it again") from error
    if size < end:
        raise HobbitError(f"{path} is incomplete: it has {size} of {end} bytes; download it again")
    return set(header)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        _check_no_pointer(path)
        raise HobbitError(f"{path} cannot be read as JSON: download it again") from error
    return found if isinstance(found, dict) else {}
