# SPDX-License-Identifier: MIT
"""Opens the model to convert: a GGUF, single or split."""

from collections.abc import Sequence
from pathlib import Path

from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import GgufFile, TensorInfo
from pyhobbit.model.loading import check_loads
from pyhobbit.model.model_file import check_form, model_parts
from pyhobbit.model.names import check_model_file
from pyhobbit.model.tiers import routed_part


def read_model(path: Path) -> GgufFile:
    """The model in a GGUF file, or in it and its other splits: as one file without keys of splits.

    Raises HobbitError if a file is missing or damaged, or if the model cannot be loaded or given tiers.
    """
    check_model_file(path)
    files = model_parts(path)
    check_form(files)
    tensors = tuple(tensor for file in files for tensor in file.tensors)
    names = {tensor.name for tensor in tensors}
    if len(names) != len(tensors):
        raise HobbitError(f"the splits of {path} hold the same tensor twice: download them again")
    first = files[0]
    if "hobbit.version" in first.metadata or "hobbit.tiers" in first.metadata:
        raise HobbitError(f"{path} already has tiers: convert the model that it was made from")
    check_routed(path, tensors)
    if "tokenizer.ggml.model" in first.metadata:  # else it is only a part of a model
        check_loads(path)
    metadata = {key: entry for key, entry in first.metadata.items() if not key.startswith("split.")}
    return GgufFile(first.path, sum(file.size for file in files), metadata, tensors)


def check_routed(path: Path, tensors: Sequence[TensorInfo]) -> None:
    """Raises HobbitError unless the model has routed experts, stored as one tensor per layer and part."""
    from pyhobbit.native.ffi import lib  # loads the libraries

    for tensor in tensors:
        if routed_part(tensor.name) and (len(tensor.ne) != 3 or 0 in tensor.ne):
            raise HobbitError(f"{path}: tensor {tensor.name!r} has shape {tensor.ne}, not that of experts")
        if routed_part(tensor.name) and tensor.ne[2] > (most := lib.hobbit_max_experts()):
            raise HobbitError(
                f"{path} has layers of {tensor.ne[2]} experts, and llama.cpp runs at most {most} experts"
            )
    if not any(routed_part(tensor.name) for tensor in tensors):
        raise HobbitError(f"{path} is a dense model, it has no routed experts: nothing to split")
