# SPDX-License-Identifier: MIT
"""The file beside a model that keeps its calibration."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gguf import GGUFWriter

from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.tiers import LOOKAHEAD_MAPS, LOW_DIVERGENCES
from pyhobbit.native.files import atomic_output
from pyhobbit.quality.evaluate import Costs
from pyhobbit.quality.fit import Weights
from pyhobbit.quality.lookahead import Lookahead
from pyhobbit.settings.table import KEYS

_ARCHITECTURE = "hobbit-calibration"


@dataclass(frozen=True)
class Calibration:
    """Settings that fit a model and its low tier; see CacheConfig.

    model_bytes: size of the model's files.  low_bytes: of all experts in the low tier, 0 without one.
    They tell a calibration that belongs to something else.
    rule, t1, t2, price: the numbers of both rules and which one applies.  costs: of the rule price.
    divergences: mean KL divergence with one expert alone in low precision, laid out as expert_uses, 0 where
    the text does not use it; empty: not measured by expert.
    found: further numbers by their keys without "hobbit.": the limits, and for each rule what came out.
    expert_uses: how often each expert was chosen, [n_layers * n_experts], layer by layer; empty: not known.
    """

    model_bytes: int
    low_bytes: int
    t1: float
    t2: float
    low_share: float
    policy: str
    weights: Weights
    rule: str = "gate"
    price: float = 0.0
    costs: Costs | None = None
    expert_uses: tuple[int, ...] = ()
    divergences: tuple[float, ...] = ()
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

    def write(self, model: Path, lookahead: Lookahead | None = None) -> Path:
        """Stores it beside the model, all or nothing; returns the file. Raises HobbitError."""
        path = calibration_path(model)
        try:
            with atomic_output(path) as temporary:
                writer = GGUFWriter(temporary, _ARCHITECTURE)
                self._add_keys(writer)
                if lookahead is not None:
                    n_layers, _, _, width = lookahead.maps.shape
                    writer.add_tensor(LOOKAHEAD_MAPS, lookahead.maps.reshape(n_layers, -1, width))
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
                writer.close()
        except OSError as e:
            raise HobbitError(
                f"the calibration cannot be stored in {path}: {e.strerror}; it must lie beside the model"
            ) from e
        return path

    def _add_keys(self, writer: GGUFWriter) -> None:
        sizes = {"model_bytes": self.model_bytes, "low_bytes": self.low_bytes}
        for name, size in sizes.items():
            writer.add_uint64(f"hobbit.{name}", size)
        writer.add_string("hobbit.policy", self.policy)
        writer.add_string("hobbit.rule", self.rule)
        numbers = {"hobbit.t1": self.t1, "hobbit.t2": self.t2, "hobbit.low_share": self.low_share}
        numbers.update(zip(KEYS["weights"], self.weights, strict=True))
        numbers.update((f"hobbit.{name}", value) for name, value in self.found.items())
        arrays: dict[str, Sequence[float]] = {"hobbit.expert_uses": self.expert_uses}
        if self.costs is not None:
            numbers["hobbit.price"] = self.price
            arrays |= {"hobbit.low_costs": self.costs.low, "hobbit.skip_costs": self.costs.skip}
            arrays[LOW_DIVERGENCES] = self.divergences
        for key, number in numbers.items():
            writer.add_float64(key, number)
        for key, values in arrays.items():
            if values:
                writer.add_array(key, values)


def stored_costs(model: Path) -> Costs:
    """Costs of the rule price, from the calibration of a model. Raises HobbitError where there are none."""
    path = calibration_path(model)
    keys = read_gguf(path).metadata if path.exists() else {}
    values = [keys[key].value() for key in ("hobbit.low_costs", "hobbit.skip_costs") if key in keys]
    if len(values) != 2:
        raise HobbitError(
            f"{path} holds no costs of the rule price; run pyhobbit calibrate {model} --text FILE"
        )
    return Costs(*map(tuple, values))
