# SPDX-License-Identifier: MIT
"""The settings that a model's files bring along, and what applies where nobody says anything."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyhobbit.settings.config import WEIGHT_KEYS, CacheConfig

# What the engine takes where nobody says anything: struct settings in ggml_ext/src/engine/settings.h.
ENGINE_DEFAULTS: Mapping[str, Any] = {
    "t1": 1.0,
    "t2": 1.0,
    "policy": "echo",
    "weights": (0.6, 0.25, 0.15, 0.0),
    "prefetch": 2,
    "io_threads": 4,
}
_STORED = ("t1", "t2", "low_share", "policy", "prefetch")


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
    from pyhobbit.model.tiers import calibration_path, sidecar_path

    found = {}
    for source, file in (
        ("file", path),
        ("sidecar", sidecar or sidecar_path(path)),
        ("calibration", calibration_path(path)),
    ):
        if not file.exists():
            continue
        keys = read_gguf(file).metadata
        for name in _STORED:
            if f"hobbit.{name}" in keys:
                found[name] = Stored(keys[f"hobbit.{name}"].value(), source, file)
        if all(key in keys for key in WEIGHT_KEYS):
            found["weights"] = Stored(tuple(keys[key].value() for key in WEIGHT_KEYS), source, file)
        if source != "file":
            found[source] = Stored(str(file), "file", path)
    return found


def effective_policy(cache: CacheConfig, stored: Mapping[str, Stored]) -> str:
    """The policy that the engine takes."""
    if cache.policy is None and cache.weights is not None:
        return "hobbit"
    return cache.policy or (stored["policy"].value if "policy" in stored else ENGINE_DEFAULTS["policy"])
