# SPDX-License-Identifier: MIT
"""The files beside a model that keep its calibration, and what one that was stopped has measured."""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

from pyhobbit._tables import RULES
from pyhobbit.engine.stats import ModelInfo
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.model_file import model_files, read_model_file
from pyhobbit.native.files import atomic_output, os_errors, write_text
from pyhobbit.quality.evaluate import Costs, Quality
from pyhobbit.quality.fit import Weights
from pyhobbit.settings.config import CacheConfig
from pyhobbit.settings.table import KEYS, NUMBERS, default

_ARCHITECTURE = "hobbit-calibration"
_VERSION = 5  # the form of Measurements
_SAMPLE_BYTES = 4096  # hashed per tensor
# Mean divergence at the thresholds that convert stores, by the low tier's type: docs/quality.md
_KNOWN_KL = {"q4_0": "0.0002 to 0.011", "q3_k": "0.0007", "q2_k": "0.002"}


class Measurements:
    """Measured settings by name, in a file beside the model. key: what they belong to; others are dropped."""

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        self.path = path
        self._key = {"version": _VERSION, **key}
        self._found: dict[str, dict[str, Any]] = {}
        # a damaged file is measured again
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["key"] == self._key:
                self._found = {name: asdict(Quality(**values)) for name, values in stored["found"].items()}

    @staticmethod
    def path_of(model: Path) -> Path:
        """The file of a model's measurements."""
        return calibration_path(model).with_suffix(".partial.json")

    def __len__(self) -> int:
        return len(self._found)

    def measured(self, name: str, measure: Callable[[], Quality]) -> Quality:
        """An earlier run's measurement of this name, or a new one, which is stored at once."""
        if name not in self._found:
            self._found[name] = asdict(measure())
            write_text(self.path, json.dumps({"key": self._key, "found": self._found}))
        return Quality(**self._found[name])


@dataclass(frozen=True)
class Calibration:
    """Settings that fit a model and its low tier, all high by default; see CacheConfig.

    model_bytes: size of the model's files.  low_bytes: of all experts in the low tier, 0 without one.
    They tell a calibration that belongs to something else.
    numbers: of the rules, by option.  rule: the one that applies.  costs: of the rule price.
    found: further numbers by their keys without "hobbit.": the limits, and for each rule what came out.
    expert_uses: how often each expert was chosen, [n_layers * n_experts], layer by layer; empty: not known.
    paths: by path_table(), likewise.
    """

    model_bytes: int
    low_bytes: int = 0
    numbers: Mapping[str, float] = field(default_factory=lambda: RULES["gate"])
    low_share: float = 0.0
    weights: Weights = field(default_factory=lambda: default("weights"))
    rule: str = "gate"
    costs: Costs | None = None
    expert_uses: tuple[int, ...] = ()
    paths: tuple[int, ...] = ()
    found: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def check_place(model: Path) -> None:
        """Raises HobbitError where nothing can be stored beside the model."""
        folder = calibration_path(model).parent
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            raise HobbitError(
                f"the calibration cannot be stored beside the model: {folder} is read-only; calibrate a copy "
                "of the model, or a link to it, in another folder"
            )

    def write(self, model: Path) -> Path:
        """Stores it beside the model, all or nothing; returns the file. Raises HobbitError."""
        path = calibration_path(model)
        with os_errors(f"the calibration cannot be stored in {path}", "; it must lie beside the model"):
            with atomic_output(path) as temporary:
                writer = GGUFWriter(temporary, _ARCHITECTURE)
                self._add_keys(writer)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.close()
            Measurements.path_of(model).unlink(missing_ok=True)  # no longer needed
        return path

    def _add_keys(self, writer: GGUFWriter) -> None:
        writer.add_uint64("hobbit.model_bytes", self.model_bytes)
        writer.add_uint64("hobbit.low_bytes", self.low_bytes)
        writer.add_string("hobbit.rule", self.rule)
        numbers = dict(zip(KEYS["weights"], self.weights, strict=True))
        own = {**self.numbers, "low_share": self.low_share, **self.found}
        if self.costs is None:
            own.pop("price", None)  # it means nothing without them
        numbers |= {f"hobbit.{name}": value for name, value in own.items()}
        arrays: dict[str, Sequence[float]]
        arrays = {"hobbit.expert_uses": self.expert_uses, "hobbit.paths": self.paths}
        if self.costs is not None:
            writer.add_string("hobbit.costs_rule", "price" if self.rule == "gate" else self.rule)
            arrays |= {"hobbit.low_costs": self.costs.low, "hobbit.skip_costs": self.costs.skip}
        for key, number in numbers.items():
            writer.add_float64(key, number)
        for key, values in arrays.items():
            if values:
                writer.add_array(key, values)


def low_tier_text(model: Path, info: ModelInfo, cache: CacheConfig) -> str | None:
    """The use of the low tier, where stored numbers and no option decide it; None without one.

    info: of the model as opened with `cache`; where every expert fits in high precision, none is low.
    """
    is_chosen = any(getattr(cache, name) is not None for name in ("quality", *NUMBERS))
    fits = info.pool_bytes_high >= info.tier_bytes_high and not info.pool_slots_low
    if is_chosen or not info.has_low_tier or fits:
        return None
    if not info.precision:
        is_known = info.n_absent_high or calibration_path(model).exists()
        return None if is_known else "the low tier is not used: start with --quality small-loss"
    loss = _expected_loss(model, info.precision, cache.sidecar)
    return f"mixed precision by {info.precision}; expected loss: {loss}; --quality lossless turns it off"


def _expected_loss(model: Path, precision: str, sidecar: Path | None) -> str:
    if (path := calibration_path(model)).exists():
        file, unknown = read_gguf(path), math.nan
        of = f"hobbit.{file.get('hobbit.rule', 'gate')}"
        kl = file.get(f"{of}.check.kl_at_most", file.get(f"{of}.fit.mean_kl", unknown))
        ratio = file.get(f"{of}.check.perplexity_ratio", file.get(f"{of}.fit.perplexity_ratio", unknown))
        return f"KL divergence up to {kl:.2g} nats, perplexity {ratio - 1:+.2%}, as calibrated"
    kind = next(iter(read_model_file(model, sidecar).tiers[-1].types))
    if kind in _KNOWN_KL and precision == "t1 0.6, t2 1":
        return f"KL divergence about {_KNOWN_KL[kind]} nats, as of small models"
    return "not known without a calibration"


def digest_of(model: Path, sidecar: Path | None = None) -> str:
    """A hash of a model and its low tier: sizes, tensors and their first bytes. Raises HobbitError."""
    digest = hashlib.sha256()
    for file in model_files(model, sidecar)[0]:
        digest.update(f"{file.size}\n".encode())
        with file.path.open("rb") as data:
            for tensor in file.tensors:
                data.seek(tensor.offset)
                digest.update(f"{tensor.name} {tensor.type.name} {tensor.ne}\n".encode())
                digest.update(data.read(min(tensor.nbytes, _SAMPLE_BYTES)))
    return digest.hexdigest()
