# SPDX-License-Identifier: MIT
"""The memory that a calibration takes."""

from pathlib import Path

from pyhobbit.model.file_names import calibration_path


def lookahead_bytes(model: Path) -> int:
    """Bytes of the maps that a calibration has fitted for predicting experts; 0 without them."""
    path = calibration_path(model)
    if not path.exists():
        return 0
    # gguf takes memory, which a plan without a calibration does without
    from pyhobbit.model.gguf_file import read_gguf
    from pyhobbit.model.tiers import LOOKAHEAD_MAPS

    return sum(tensor.nbytes for tensor in read_gguf(path).tensors if tensor.name == LOOKAHEAD_MAPS)
