# SPDX-License-Identifier: MIT
"""The settings that a model's files bring along."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyhobbit.model.file_names import calibration_path, sidecar_path
from pyhobbit.settings.config import CacheConfig
from pyhobbit.settings.table import KEYS, OPTIONS, default


@dataclass(frozen=True)
class Stored:
    """A setting in one of a model's files; source: "file", "sidecar" or "calibration"."""

    value: Any
    source: str
    path: Path


def stored_settings(path: Path, sidecar: Path | None) -> dict[str, Stored]:
    """What the model's files say, by name of the setting; later files win, as in the engine."""
    # gguf takes some time to import, which the help does without
    from pyhobbit.model.gguf_file import read_gguf

    found = {}
    for source, file in (
        ("file", path),
        ("sidecar", sidecar or sidecar_path(path)),
        ("calibration", calibration_path(path)),
    ):
        if not file.exists():
            continue
        keys = read_gguf(file).metadata
        for name, specs in OPTIONS.items():
            if specs[0].is_stored and all(key in keys for key in KEYS[name]):
                values = tuple(keys[key].value() for key in KEYS[name])
                found[name] = Stored(values if len(values) > 1 else values[0], source, file)
        if source != "file":
            found[source] = Stored(str(file), "file", path)
    return found


def lookahead_bytes(model: Path) -> int:
    """Of the maps that a calibration has fitted for predicting experts; 0 without them."""
    path = calibration_path(model)
    if not path.exists():
        return 0
    # gguf takes memory, which a plan without a calibration does without
    from pyhobbit.model.gguf_file import read_gguf
    from pyhobbit.model.tiers import LOOKAHEAD_MAPS

    return sum(tensor.nbytes for tensor in read_gguf(path).tensors if tensor.name == LOOKAHEAD_MAPS)


def effective_rule(cache: CacheConfig, stored: Mapping[str, Stored]) -> str:
    """The precision rule that the engine takes."""
    if cache.rule is not None:
        return cache.rule
    if cache.price is not None:
        return "price"
    is_gate = cache.t1 is not None or cache.t2 is not None or "rule" not in stored
    return default("rule") if is_gate else stored["rule"].value


def effective_policy(cache: CacheConfig, stored: Mapping[str, Stored]) -> str:
    """The policy that the engine takes."""
    if cache.policy is None and cache.weights is not None:
        return "hobbit"
    return cache.policy or (stored["policy"].value if "policy" in stored else default("policy"))
