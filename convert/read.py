# SPDX-License-Identifier: MIT
"""Opens the model to convert: a GGUF, single or split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import GgufFile, TensorInfo
from pyhobbit.model.model_file import model_parts
from pyhobbit.model.tiers import routed_part

_SEPARATE_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")


def read_model(path: Path) -> GgufFile:
    """The model in a GGUF file, or in all the splits that it is one of: as one file without keys of splits.

    Raises HobbitError if a file is missing or damaged, or if the model cannot be given tiers.
    """
    files = model_parts(path)
    tensors = tuple(tensor for file in files for tensor in file.tensors)
    names = {tensor.name for tensor in tensors}
    if len(names) != len(tensors):
        raise HobbitError(f"the splits of {path} hold the same tensor twice: download them again")
    first = files[0]
    if "hobbit.version" in first.metadata or "hobbit.tiers" in first.metadata:
        raise HobbitError(f"{path} already has tiers: convert the model that it was made from")
    check_routed(path, tensors)
    metadata = {key: entry for key, entry in first.metadata.items() if not key.startswith("split.")}
    return GgufFile(first.path, sum(file.size for file in files), metadata, tensors)


def check_routed(path: Path, tensors: Sequence[TensorInfo]) -> None:
    """Raises HobbitError unless the model has routed experts, stored as one tensor per layer and part."""
    from pyhobbit.native.ffi import lib  # loads the libraries

    for tensor in tensors:
        if _SEPARATE_EXPERT.fullmatch(tensor.name):
            raise HobbitError(
                f"{path} has one tensor per expert, as llama.cpp once wrote them: convert it anew"
            )
        if routed_part(tensor.name) and (len(tensor.ne) != 3 or 0 in tensor.ne):
            raise HobbitError(f"{path}: tensor {tensor.name!r} has shape {tensor.ne}, not that of experts")
        if routed_part(tensor.name) and tensor.ne[2] > (most := lib.hobbit_max_experts()):
            raise HobbitError(
                f"{path} has layers of {tensor.ne[2]} experts, and llama.cpp runs at most {most} experts"
            )
    if not any(routed_part(tensor.name) for tensor in tensors):
        raise HobbitError(f"{path} is a dense model, it has no routed experts: nothing to split")
