# SPDX-License-Identifier: MIT
"""The matrices of single experts in each precision, read from a model's files."""

from itertools import count
from pathlib import Path

import numpy as np

from pyhobbit.model.gguf_file import TensorInfo, read_floats
from pyhobbit.model.model_file import model_files
from pyhobbit.model.quantize import dequantize
from pyhobbit.model.tiers import Part, group_key, read_tiers, tier_tensor_name


class ExpertWeights:
    """Reads from the disk whenever it is asked. sidecar: default MODEL.hobbit.gguf where it exists.

    Raises HobbitError if a file is damaged or missing.
    """

    def __init__(self, path: Path, sidecar: Path | None = None) -> None:
        files, self._groups = model_files(path, sidecar)
        self._tiers = read_tiers(self._groups)
        self._tensors = {tensor.name: tensor for file in files for tensor in file.tensors}

    def has(self, part: Part, n_in: int) -> bool:
        """Tells if the layer's experts have this part, for inputs of this width."""
        tensor = self._tensors.get(f"blk.{part.layer}.{part.name}.weight")
        return tensor is not None and tensor.ne[0] == n_in

    def matrix(self, part: Part, tier: str, expert: int) -> np.ndarray | None:
        """float32 [n_out, n_in]; None where the tier lacks the expert."""
        if tier == self._tiers.plain:
            return _read(self._tensors[f"blk.{part.layer}.{part.name}.weight"], expert)
        for group in count():
            tensor = self._tensors.get(tier_tensor_name(part, tier, group))
            if tensor is None:
                return None
            experts = self._groups.get(group_key(part, tier, group), list(range(tensor.ne[2])))
            if expert in experts:
                return _read(tensor, experts.index(expert))
        raise AssertionError

    def bias(self, part: Part, expert: int) -> np.ndarray | float:
        """float32 [n_out]; 0 where there is none."""
        tensor = self._tensors.get(f"blk.{part.layer}.{part.name}.bias")
        return 0.0 if tensor is None else read_floats(tensor)[expert]


def _read(tensor: TensorInfo, i: int) -> np.ndarray:
    """The i-th matrix of a tensor."""
    n_bytes = tensor.nbytes // tensor.ne[2]
    data = np.fromfile(tensor.path, np.uint8, n_bytes, offset=tensor.offset + i * n_bytes)
    return dequantize(tensor.type, data, tensor.ne[0])
