# SPDX-License-Identifier: MIT
"""The headers of a MoE model's files, and its routers."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyhobbit.errors import HobbitError, LoadError
from pyhobbit.model.file_names import calibration_path, part_names, sidecar_path, split_name
from pyhobbit.model.gguf_file import GgufFile, KeyValue, TensorInfo, read_floats, read_gguf
from pyhobbit.model.router import Gating, Router
from pyhobbit.model.tiers import Part, Tiers, read_tiers, routed_part, tiered_part, under_own_names
from pyhobbit.settings.config import Setting

_SEPARATE_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.weight")
_OLLAMAS_TENSOR = re.compile(r"v\..*|mm\..*|blk\.\d+\.ssm_dt")


@dataclass(frozen=True)
class Tier:
    """One version of all routed experts.

    types: bytes by ggml type, the most first.  bits_per_weight: mean.  expert_bytes: of one expert, mean.
    part_bytes: of the largest matrix of an expert.
    n_absent: experts of all layers that the tier lacks, of n_experts.
    """

    name: str
    path: Path
    n_bytes: int
    types: Mapping[str, int]
    bits_per_weight: float
    expert_bytes: float
    part_bytes: int
    n_absent: int = 0
    n_experts: int = 0


@dataclass(frozen=True)
class ModelFile:
    """A MoE model in one or several GGUF files, with its sidecar where it has one.

    blocks: numbers of the layers with routed experts.  tensors: by name, as llama.cpp names them.
    resident_bytes: of all but routed experts.  calibration: what pyhobbit calibrate stored beside the model.
    """

    path: Path
    metadata: Mapping[str, KeyValue]
    tensors: Mapping[str, TensorInfo]
    blocks: tuple[int, ...]
    tiers: tuple[Tier, ...]
    resident_bytes: int
    calibration: Path | None

    def key(self, name: str, default: Any = None) -> Any:
        """The value of a key of the architecture, such as "expert_count"."""
        return self.value(f"{self.architecture}.{name}", default)

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key in full, such as "general.name"."""
        return self.metadata[key].value() if key in self.metadata else default

    @property
    def architecture(self) -> str:
        return self.value("general.architecture", "unknown")

    @property
    def n_experts(self) -> int:
        """Experts of the layer that has the most."""
        return max(tensor.ne[2] for tensor in self.routed_tensors())

    @property
    def n_used(self) -> dict[int, int]:
        """Experts of a token by block, of those with routed experts."""
        used = self.key("expert_used_count", 0)
        by_block = dict(enumerate(used)) if isinstance(used, list) else {}
        return {block: by_block.get(block, 0 if by_block else used) for block in self.blocks}

    @property
    def n_shared(self) -> int:
        """Experts that every token uses; some architectures have one without a key that says so."""
        return max(self.key("expert_shared_count", 0), any("_shexp." in name for name in self.tensors))

    def routed_tensors(self) -> list[TensorInfo]:
        """Tensors of the routed experts under llama.cpp's own names."""
        return [tensor for tensor in self.tensors.values() if routed_part(tensor.name)]

    @property
    def n_parameters(self) -> int:
        return sum(tensor.n_values for tensor in self.tensors.values())

    @property
    def gating(self) -> Gating | None:
        """None: one that is not known here."""
        has_bias = any(f"blk.{block}.exp_probs_b.bias" in self.tensors for block in self.blocks)
        # Architectures with such a bias take the sigmoid where the file does not say.
        number = self.key("expert_gating_func", (Gating.SIGMOID if has_bias else Gating.SOFTMAX).value)
        return Gating(number) if number in [gating.value for gating in Gating] else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "path": str(self.path),
            "name": self.value("general.name"),
            "architecture": self.architecture,
            "n_parameters": self.n_parameters,
            "n_layers": self.key("block_count"),
            "layers_with_experts": self.blocks,
            "n_experts": self.n_experts,
            "n_experts_used": max(self.n_used.values()),
            "n_experts_used_by_layer": list(self.n_used.values()),
            "n_experts_shared": self.n_shared,
            "resident_bytes": self.resident_bytes,
            "tiers": [{**asdict(tier), "path": str(tier.path)} for tier in self.tiers],
            "calibration": self.calibration and str(self.calibration),
        }

    def routers(self, blocks: Sequence[int]) -> list[Router] | None:
        """The routers of these layers; None where one is not stored as most architectures store it."""
        found = [router for router in map(self._router, blocks) if router is not None]
        return found if len(found) == len(blocks) else None

    def _router(self, block: int) -> Router | None:
        weight = self._floats(f"blk.{block}.ffn_gate_inp.weight")
        gating = self.gating
        if weight is None or weight.ndim != 2 or gating is None:
            return None
        return Router(
            weight=weight,
            bias=self._floats(f"blk.{block}.ffn_gate_inp.bias"),
            selection_bias=self._floats(f"blk.{block}.exp_probs_b.bias"),
            gating=gating,
            n_groups=max(1, self.key("expert_group_count", 1)),
            n_groups_used=max(1, self.key("expert_group_used_count", 1)),
        )

    def _floats(self, name: str) -> np.ndarray | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else read_floats(tensor)


def read_model_file(path: Path, sidecar: Path | None = None) -> ModelFile:
    """The headers of a model. Raises HobbitError for a damaged or missing file, or one without experts."""
    files, described = model_files(path, sidecar)
    check_form(files)
    tiers = read_tiers(described)
    everything = [tensor for file in files for tensor in file.tensors]
    tensors = under_own_names(everything, tiers)
    blocks = sorted({part.layer for part in map(routed_part, tensors) if part is not None})
    if not blocks:
        raise HobbitError(f"{path} is a dense model: it has no routed experts to look at")
    calibration = calibration_path(path)
    n_all = sum({p.layer: each.ne[2] for each in tensors.values() if (p := routed_part(each.name))}.values())
    return ModelFile(
        path=path,
        metadata=files[0].metadata,
        tensors=tensors,
        blocks=tuple(blocks),
        tiers=tuple(_describe(name, tiers, everything, n_all) for name in tiers.names),
        resident_bytes=sum(tensor.nbytes for name, tensor in tensors.items() if not routed_part(name)),
        calibration=calibration if calibration.exists() else None,
    )


def opened_info(path: Path, settings: Mapping[str, Setting]) -> Any:
    """struct hobbit_info of the model with these settings, no weight read. Raises HobbitError."""
    from pyhobbit.native.ffi import check, ffi, lib  # takes the native libraries
    from pyhobbit.settings.resolve import c_settings

    given, model = c_settings(settings), ffi.new("hobbit_model **")
    try:
        check(lib.hobbit_open, bytes(path), given, len(settings), model)
    except HobbitError:
        check_form(model_parts(path))  # says more about the files of other programs
        raise
    info = ffi.new("struct hobbit_info *")
    if model[0]:
        lib.hobbit_get_info(model[0], info)
        lib.hobbit_unref(model[0])
    return info


def model_files(path: Path, sidecar: Path | None = None) -> tuple[list[GgufFile], GgufFile]:
    """A model's headers, the sidecar's last, and the one that describes tiers. Raises HobbitError."""
    files = model_parts(path)
    if sidecar is None and not sidecar_path(path).exists():
        return files, files[0]
    files.append(read_gguf(sidecar or sidecar_path(path)))
    return files, files[-1]


def model_parts(path: Path) -> list[GgufFile]:
    """The headers of a model's own files, in order. Raises HobbitError if one is damaged or missing."""
    file = read_gguf(path)
    count, own = file.get("split.count", 0), file.get("split.no", 0)
    if count <= 1:
        return [file]
    if own:
        raise HobbitError(f"'{path}' is part {own + 1} of a split model: give its first part")
    from pyhobbit.native.ffi import first_part

    first = first_part(path)
    split = split_name(first)
    if split is None or split[2] != count:
        raise HobbitError(f"{path} is one of {count} splits, but not named NAME-00001-of-{count:05d}.gguf")
    paths = [first.with_name(name) for name in part_names(first.name)]
    for missing in (path for path in paths if not path.exists()):
        raise HobbitError(f"a split of the model is missing: {missing}")
    files = [read_gguf(path) for path in paths]
    for number, file in enumerate(files):
        if (file.get("split.no", -1), file.get("split.count", 0)) != (number, count):
            raise HobbitError(f"{file.path} is not split {number + 1} of {count}: download it again")
    n_tensors = sum(len(file.tensors) for file in files)
    n_expected = files[0].get("split.tensors.count", n_tensors)
    if n_tensors != n_expected:
        raise HobbitError(f"the splits of {path} hold {n_tensors} tensors, not {n_expected}")
    return files


def check_form(files: Sequence[GgufFile]) -> None:
    """Raises LoadError for models in a form that llama.cpp does not load, though they are whole."""
    keys, names = files[0].metadata, [tensor.name for file in files for tensor in file.tensors]
    path = files[0].path
    if any(map(_SEPARATE_EXPERT.fullmatch, names)):
        raise LoadError(
            f"{path} has one tensor per expert, as llama.cpp once wrote them: take a newer file of the model"
        )
    sections = next((key for key in keys if key.endswith(".rope.dimension_sections")), None)
    if (
        files[0].get("general.architecture", "") == "gptoss"
        or (sections and len(keys[sections].value()) == 3)
        or any(map(_OLLAMAS_TENSOR.fullmatch, names))
    ):
        raise LoadError(
            f"{path} is in Ollama's own form, which llama.cpp does not load: take the model from Hugging Face"
        )


def expert_bytes(parts: Iterable[GgufFile]) -> list[int]:
    """Bytes of a model's routed experts by layer, 0 where it has none."""
    sizes: Counter[int] = Counter()
    for tensor in (tensor for file in parts for tensor in file.tensors):
        if part := routed_part(tensor.name):
            sizes[part.layer] += tensor.nbytes
    return [sizes[layer] for layer in range(max(sizes, default=-1) + 1)]


def holds_head(tensor_names: Iterable[str]) -> bool:
    """Tells if one of a model's tensors is of a draft head (MTP)."""
    return any(".nextn.eh_proj." in name for name in tensor_names)


def _describe(name: str, tiers: Tiers, tensors: list[TensorInfo], n_all: int) -> Tier:
    own = [tensor for tensor in tensors if tiers.of(tensor.name) == name]
    types: Counter[str] = Counter()
    for tensor in own:
        types[tensor.type.name] += tensor.nbytes
    n_bytes = sum(types.values())
    held: Counter[Part] = Counter()
    for tensor in own:
        if part := tiered_part(tensor.name):
            held[part] += tensor.ne[2]
    n_held = sum({part.layer: n for part, n in held.items()}.values())
    return Tier(
        name=name,
        path=own[0].path,
        n_bytes=n_bytes,
        types=dict(types.most_common()),
        bits_per_weight=8 * n_bytes / sum(tensor.n_values for tensor in own),
        expert_bytes=n_bytes / n_held,
        part_bytes=max(tensor.nbytes // tensor.ne[2] for tensor in own),
        n_absent=n_all - n_held,
        n_experts=n_all,
    )
