# SPDX-License-Identifier: MIT
"""Looks at a checkpoint's files before it is converted: the absent, the cut, and forms of other programs."""

import json
import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import MISTRALS_OWN
from pyhobbit.model.names import check_quantised

_POINTER = b"version https://git-lfs"
_POINTER_BYTES = 1024  # at most
_READ = (".json", ".model", ".txt", ".tiktoken", ".jinja")  # the converter reads them beside the weights
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_INDICES = tuple(f"{name}.index.json" for name in _SINGLE)
_NUMBERED = re.compile(r"(.+-)(\d{5})(-of-)(\d{5})(\.\w+)")
_NAME_BYTES = 255
_LAYER = re.compile(r"(?:^|model\.|transformer\.)layers\.(\d{1,9})\.")
_SENSES = re.compile("vision|visual|audio")
_MOST_HEADER = 1 << 28  # bytes; safetensors itself allows 100 MB
_LAYERS = ("n_layers", "num_hidden_layers", "n_layer", "num_layers")
_NEEDED = ("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OF_LAYERS = ("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size")
_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta")
_OBJECTS = ("text_config", "quantization_config", "rope_scaling", "rope_parameters")
_OBJECT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_Kind = tuple[str, Callable[[Any], bool]]  # words for a valid field of config.json, and the test for it


def _whole(least: int, most: int, *others: type) -> _Kind:
    what = f"a whole number from {least} to {most}"
    return what, lambda n: isinstance(n, others) or (type(n) is int and least <= n <= most)


_NUMBER = "a number from 0", lambda x: x is None or (type(x) in (int, float) and 0 <= x < math.inf)
_FIELDS: dict[str, _Kind] = {
    **dict.fromkeys(_LAYERS, _whole(1, 10_000)),
    **dict.fromkeys(_NEEDED, _whole(1, 1 << 24)),
    **dict.fromkeys(_OF_LAYERS, _whole(1, 1 << 24, type(None), list)),
    **dict.fromkeys((*_EXPERTS, "num_experts_per_tok"), _whole(0, 1 << 16, type(None))),
    **dict.fromkeys(_NUMBERS, _NUMBER),
    **dict.fromkeys(_OBJECTS, ("an object", lambda x: x is None or isinstance(x, dict))),
    "architectures": ("a list of names", lambda x: isinstance(x, list) and {*map(type, x)} == {str}),
}


def check_checkpoint(folder: Path) -> bool:
    """Tells if it may have a draft block (MTP). Raises HobbitError for the first absent file or layer."""
    config = _config(folder)
    check_quantised(folder, folder / "config.json")
    parts = weight_files(folder)
    for path in (*parts, *(each for each in sorted(folder.iterdir()) if each.suffix in _READ)):
        if not path.is_file():
            raise HobbitError(f"a file of the checkpoint is missing: {path}; download it")
        _check_whole(path)
        if path.name in _OBJECT_FILES:
            _read_json(path)
    if not parts and any(folder.glob("consolidated*.safetensors")):
        raise HobbitError(MISTRALS_OWN.format(folder))
    names = {name for path in parts if path.suffix == ".safetensors" for name in _safetensors_names(path)}
    for name, part in _weight_map(folder).items():
        if names and folder / part in parts and name not in names:
            raise HobbitError(f"{folder / part} lacks the tensor {name!r}: download it again")
    n_layers = next((config[key] for key in _LAYERS if config.get(key) is not None), 0)
    layers = {int(found[1]) for name in names if (found := _LAYER.search(name)) and not _SENSES.search(name)}
    if layers and (absent := sorted(set(range(n_layers)) - layers)):
        raise HobbitError(
            f"{folder} has no weights of layer {absent[0]}: download the rest of the checkpoint"
        )
    has_mtp = any("mtp" in name or "nextn" in name for name in names) or max(layers, default=0) >= n_layers
    return has_mtp or not names


def _config(folder: Path) -> dict[str, Any]:
    """Reads config.json with its part about text. Raises HobbitError for a field that cannot be."""
    path = folder / "config.json"
    config = _read_json(path)
    config |= text if isinstance(text := config.get("text_config"), dict) else {}
    n_experts = max((n for key in _EXPERTS if type(n := config.get(key)) is int), default=0)
    used = {"num_experts_per_tok": _whole(1, n_experts)} if n_experts > 0 else {}
    for key, (what, holds) in (_FIELDS | used).items():
        if key in config and not holds(config[key]):
            raise _wrong(path, key, json.dumps(config[key]), f"{what} is needed; ")
    return config


def _wrong(path: Path, key: str, value: object, wanted: str = "") -> HobbitError:
    return HobbitError(f"{path} is damaged: its {key} is {str(value)[:40]}; {wanted}download it again")


def _weight_map(folder: Path) -> dict[str, str]:
    """File names by tensor; empty without an index."""
    for path in (folder / name for name in _INDICES):
        if path.is_file():
            found = _read_json(path).get("weight_map")
            if not isinstance(found, dict):
                raise HobbitError(f"{path} has no weight_map: download it again")
            for name in found.values():
                if not isinstance(name, str) or not 0 < len(name) < _NAME_BYTES or "/" in name:
                    raise _wrong(path, "weight_map", name)
            return found
    return {}


def weight_files(folder: Path) -> list[Path]:
    """The files with weights, those that an index or their names announce included.

    Raises HobbitError where an index and a file beside it both hold the model.
    """
    listed = {folder / name for name in _weight_map(folder).values()}
    found = next((each for pattern in _WEIGHTS if (each := sorted(folder.glob(pattern)))), [])
    single = {path for path in found if path.name in _SINGLE}
    if listed and single - listed:
        raise HobbitError(
            f"{min(single)} and {min(listed)} both hold the model: remove those that are out of date"
        )
    return sorted(listed or {*found}.union(*_announced(found)))


def _announced(paths: Iterable[Path]) -> list[set[Path]]:
    """The shards of each set of which one is there."""
    sets = {n.group(1, 3, 4, 5): path for path in paths if (n := _NUMBERED.fullmatch(path.name))}
    return [
        {path.with_name(f"{start}{i:0{len(count)}}{of}{count}{end}") for i in range(1, int(count) + 1)}
        for (start, of, count, end), path in sets.items()
    ]


def _check_whole(path: Path) -> None:
    """Raises HobbitError for a pointer in place of the file, and for a file of PyTorch that is cut."""
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
    if start == _POINTER and path.stat().st_size <= _POINTER_BYTES:
        raise HobbitError(
            f"{path} is a Git LFS pointer, not the file itself: run git lfs pull in {path.parent}, or "
            "download it"
        )
    if path.suffix == ".bin" and start.startswith(b"PK") and not zipfile.is_zipfile(path):
        raise HobbitError(f"{path} is incomplete: download it again")


def _safetensors_names(path: Path) -> set[str]:
    """Raises HobbitError if the file ends before its tensors do."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        n_header = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        data = file.read(n_header) if n_header <= min(size, _MOST_HEADER) else b""
    try:
        header: dict[str, Any] = json.loads(data)
        header.pop("__metadata__", None)
        ends = [each["data_offsets"] for each in header.values()]
        if not all(type(a) is type(b) is int and 0 <= a <= b for a, b in ends):
            raise ValueError("offsets")
        end = 8 + n_header + max((b for _, b in ends), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise HobbitError(f"{path} is incomplete or damaged in its header: download it again") from error
    if size < end:
        raise HobbitError(f"{path} is incomplete: it has {size} of {end} bytes; download it again")
    return set(header)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict):
            return found
    except (OSError, ValueError, RecursionError) as error:
        _check_whole(path)
        raise HobbitError(f"{path} cannot be read as JSON: download it again") from error
    raise HobbitError(f"{path} is no JSON object: download it again")
