# SPDX-License-Identifier: MIT
"""The file beside a model that keeps its calibration."""

import os
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGUFValueType

from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.model.gguf_file import (
    KeyValue,
    Placement,
    align,
    floats_entry,
    ints_entry,
    pack_header,
    read_gguf,
    scalar_entry,
    string_entry,
)
from pyhobbit.model.quantize import type_by_name
from pyhobbit.model.tiers import LOOKAHEAD_MAPS, LOW_DIVERGENCES
from pyhobbit.native.files import atomic_output
from pyhobbit.quality.evaluate import Costs
from pyhobbit.quality.fit import Weights
from pyhobbit.quality.lookahead import Lookahead
from pyhobbit.settings.table import KEYS

_ALIGNMENT = 32  # GGUF's default
_ARCHITECTURE = "hobbit-calibration"


@dataclass(frozen=True)
class Calibration:
    """Settings that fit a model and its low tier; see CacheConfig.

    model_bytes: size of the model's files.  low_bytes: of all experts in the low tier, 0 without one.
    residual_bytes: of a residual tier, 0 without one. They tell a calibration that belongs to something else.
    rule, t1, t2, price: the numbers of both rules and which one applies.  costs: of the rule price.
    divergences: mean KL divergence with one expert alone in low precision, laid out as expert_uses, 0 where
    the text does not use it; empty: not measured by expert.
    expert_uses: how often each expert was chosen, [n_layers * n_experts], layer by layer; empty: not known.
    """

    model_bytes: int
    low_bytes: int
    t1: float
    t2: float
    low_share: float
    policy: str
    weights: Weights
    residual_bytes: int = 0
    rule: str = "gate"
    price: float = 0.0
    costs: Costs | None = None
    expert_uses: tuple[int, ...] = ()
    divergences: tuple[float, ...] = ()

    @staticmethod
    def check_place(model: Path) -> None:
        """Raises HobbitError where nothing can be stored beside the model."""
        folder = calibration_path(model).parent
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            raise HobbitError(
                f"the calibration cannot be stored beside the model: {folder} is read-only; calibrate a copy "
                "of the model, or a link to it, in another folder"
            )

    def write(self, model: Path, lookahead: Lookahead | None = None) -> Path:
        """Stores it beside the model, all or nothing; returns the file. Raises HobbitError."""
        path = calibration_path(model)
        placements: list[Placement] = []
        data = b""
        if lookahead is not None:
            n_layers, n_ahead, n_experts, width = lookahead.maps.shape
            shape = (width, n_ahead * n_experts, n_layers)
            placements = [Placement(LOOKAHEAD_MAPS, type_by_name("f16"), shape, 0)]
            data = lookahead.maps.tobytes()
            data = data.ljust(align(len(data), _ALIGNMENT), b"\0")
        try:
            with atomic_output(path) as temporary:
                temporary.write_bytes(pack_header(self._metadata(), placements, _ALIGNMENT) + data)
        except OSError as e:
            raise HobbitError(
                f"the calibration cannot be stored in {path}: {e.strerror}; it must lie beside the model"
            ) from e
        return path

    def _metadata(self) -> list[KeyValue]:
        numbers = {"t1": self.t1, "t2": self.t2, "low_share": self.low_share}
        if self.costs is not None:
            numbers["price"] = self.price
        floats = {f"hobbit.{name}": value for name, value in numbers.items()}
        floats.update(zip(KEYS["weights"], self.weights, strict=True))
        sizes = {"hobbit.model_bytes": self.model_bytes, "hobbit.low_bytes": self.low_bytes}
        if self.residual_bytes:
            sizes["hobbit.high_bytes"] = self.residual_bytes
        return [
            string_entry("general.architecture", _ARCHITECTURE),
            *(scalar_entry(key, GGUFValueType.UINT64, size) for key, size in sizes.items()),
            string_entry("hobbit.policy", self.policy),
            string_entry("hobbit.rule", self.rule),
            *(scalar_entry(key, GGUFValueType.FLOAT64, value) for key, value in floats.items()),
            *([ints_entry("hobbit.expert_uses", self.expert_uses)] if self.expert_uses else []),
            *(floats_entry(key, values) for key, values in self._costs().items()),
        ]

    def _costs(self) -> dict[str, tuple[float, ...]]:
        if self.costs is None:
            return {}
        arrays = {"hobbit.low_costs": self.costs.low, "hobbit.skip_costs": self.costs.skip}
        if self.divergences:
            arrays[LOW_DIVERGENCES] = self.divergences
        return arrays


def stored_costs(model: Path) -> Costs:
    """Of the rule price, from the calibration of a model. Raises HobbitError where there are none."""
    path = calibration_path(model)
    keys = read_gguf(path).metadata if path.exists() else {}
    values = [keys[key].value() for key in ("hobbit.low_costs", "hobbit.skip_costs") if key in keys]
    if len(values) != 2:
        raise HobbitError(
            f"{path} holds no costs of the rule price; run pyhobbit calibrate {model} --text FILE"
        )
    return Costs(*map(tuple, values))
