# SPDX-License-Identifier: MIT
"""The experts of a second file of the same model, as they are; refuses a file of another model."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pyhobbit.convert.read import read_model
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import part_names
from pyhobbit.model.gguf_file import GgufFile, TensorInfo, read_floats
from pyhobbit.model.tiers import routed_part

# A publisher may change these without touching the experts.
_CONTEXT = ("context_length", "rope.")
_TOKENS = "tokenizer.ggml.tokens"
_MOST_RENAMED = 0.01  # share of the tokens

# Both tiers share these: the routers, and what is added to an expert's products or multiplied with them.
_SHARED = re.compile(r"blk\.\d+\.(ffn_gate_inp\.\w+|exp_probs_b\.bias|ffn_\w+_exps\.(bias|scale))")
_ROUNDING = 0.002  # relative error of values rounded to 16 bits
_COARSE_ROUNDING = 0.02  # relative error of values rounded to 8 bits
_FLOATS = ("f32", "f16", "bf16")


def read_low_file(path: Path) -> GgufFile:
    """The file of `--low-from`, which any of its splits names. Raises HobbitError as read_model() does."""
    return read_model(path.parent / part_names(path.name)[0])


def read_low_experts(path: Path, model: GgufFile) -> dict[str, TensorInfo]:
    """Routed expert tensors of a GGUF by name. Raises HobbitError unless it holds `model` in other types."""
    other = read_low_file(path)
    if other.path.samefile(model.path):
        raise HobbitError(f"--low-from {path} is the model itself: name a smaller file of the same model")
    difference = next(_differences(model, other), None)
    if difference is not None:
        raise HobbitError(f"--low-from {path} cannot be the low tier of {model.path}: {difference}")
    return {tensor.name: tensor for tensor in other.tensors if routed_part(tensor.name)}


def _differences(model: GgufFile, other: GgufFile) -> Iterator[str]:
    """Differences which show that `other` holds another model."""
    yield from _other_keys(
        *({entry.key: entry.value() for entry in file.metadata.values()} for file in (model, other))
    )
    own, found = (
        {each.name: each for each in file.tensors if routed_part(each.name) or _SHARED.fullmatch(each.name)}
        for file in (model, other)
    )
    for name in sorted(own.keys() | found.keys()):
        if name not in found:
            yield f"it has no tensor {name!r}"
        elif name not in own:
            yield f"it has a tensor {name!r}, which the model lacks"
        elif own[name].ne != found[name].ne:
            yield f"its tensor {name!r} has shape {found[name].ne}, not {own[name].ne}"
    for name, tensor in own.items():
        if not routed_part(name) and not _same_values(tensor, found[name]):
            yield f"the values of its tensor {name!r} differ"


def _other_keys(own: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Differences of the hyper-parameters and of the vocabulary."""
    architecture = own.get("general.architecture")
    ignored = tuple(f"{architecture}.{name}" for name in _CONTEXT)
    keys = [key for key in own if key.startswith(f"{architecture}.") and not key.startswith(ignored)]
    for key in ("general.architecture", *keys):
        if key in found and found[key] != own[key]:
            yield f"its {key} is {found[key]}, not {own[key]}"
    tokens, others = own.get(_TOKENS, []), found.get(_TOKENS, [])
    if len(tokens) != len(others):
        yield f"its vocabulary has {len(others)} tokens, not {len(tokens)}"
    n_different = sum(token != other for token, other in zip(tokens, others, strict=False))
    if n_different > _MOST_RENAMED * len(tokens):
        yield f"{n_different} of the {len(tokens)} tokens of its vocabulary differ"


def _same_values(own: TensorInfo, found: TensorInfo) -> bool:
    """Tells if both are roundings of the same values, by the root mean square of their difference."""
    is_coarse = {own.type.name, found.type.name} - set(_FLOATS)
    values, others = read_floats(own), read_floats(found)
    most = _COARSE_ROUNDING if is_coarse else _ROUNDING
    return bool(np.linalg.norm(values - others) <= most * np.linalg.norm(values))
