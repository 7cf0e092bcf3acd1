# SPDX-License-Identifier: MIT
"""Plans the output's tensors and their places: a pure function of the source's tensors and the types."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import Placement, TensorInfo, align, tensor_nbytes
from pyhobbit.model.quantize import GgmlType
from pyhobbit.model.tiers import ALIGNMENT, HIGH, LOW, Part, low_type_like, routed_part, tier_tensor_name

RESIDENT = "resident"


@dataclass(frozen=True)
class Recipe:
    """Types of the tiers; `high` None keeps what the source has. `sidecar` plans what the source lacks only.

    `low`: a type for all tensors that can have it, or types by the names of the source's routed tensors.
    """

    low: GgmlType | Mapping[str, GgmlType]
    high: GgmlType | None = None
    sidecar: bool = False


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the output. offset: in its data.  experts: of the source's, ascending; None for all."""

    name: str
    type: GgmlType
    tier: str
    source: TensorInfo
    experts: tuple[int, ...] | None = None
    offset: int = 0

    @property
    def ne(self) -> tuple[int, ...]:
        """The shape, in ggml's order."""
        return self.source.ne if self.experts is None else (*self.source.ne[:2], len(self.experts))

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.type, self.ne)

    @property
    def is_copy(self) -> bool:
        """Byte for byte of the source, or of some of its experts."""
        return self.type == self.source.type


@dataclass(frozen=True)
class Plan:
    tensors: tuple[PlannedTensor, ...]

    @property
    def data_bytes(self) -> int:
        last = self.tensors[-1]
        return align(last.offset + last.nbytes, ALIGNMENT)

    @property
    def read_bytes(self) -> int:
        """Bytes of the sources that go into the output; a source of several tensors counts once."""
        parts = {t.source: t.source.nbytes if t.experts is None else t.nbytes for t in self.tensors}
        return sum(parts.values())

    def placements(self) -> list[Placement]:
        return [(tensor.name, tensor.type, tensor.ne, tensor.offset) for tensor in self.tensors]

    def sources(self) -> list[TensorInfo]:
        return list(dict.fromkeys(tensor.source for tensor in self.tensors))

    def tier(self, tier: str) -> list[PlannedTensor]:
        return [tensor for tensor in self.tensors if tensor.tier == tier]

    def tier_bytes(self, tier: str) -> int:
        return sum(tensor.nbytes for tensor in self.tier(tier))


def make_plan(tensors: Sequence[TensorInfo], recipe: Recipe, imatrix: Collection[str] = ()) -> Plan:
    """Plans residents first, then tier by tier, layer by layer; `imatrix` names the tensors it covers.

    A tensor that cannot have the one type of the low tier, as others can, gets the next one that suits it.
    Raises HobbitError if none can, or if a tensor cannot have the type of the high tier.
    """
    residents = [tensor for tensor in tensors if routed_part(tensor.name) is None]
    routed = [(part, tensor) for tensor in tensors if (part := routed_part(tensor.name))]
    routed.sort(key=lambda item: item[0].layer)  # within a layer, the parts stay in the source's order
    wanted: list[PlannedTensor] = []
    if not recipe.sidecar:
        wanted += [PlannedTensor(tensor.name, tensor.type, RESIDENT, tensor) for tensor in residents]
    wanted += _tiers(recipe, routed, imatrix)
    for tensor in wanted:
        _check_type(tensor, imatrix)
    return placed(wanted)


def placed(tensors: Iterable[PlannedTensor]) -> Plan:
    """The plan of an output with these tensors one after the other."""
    planned, offset = [], 0
    for tensor in tensors:
        planned.append(replace(tensor, offset=offset))
        offset = align(offset + tensor.nbytes, ALIGNMENT)
    return Plan(tuple(planned))


_Routed = Sequence[tuple[Part, TensorInfo]]


def _tiers(recipe: Recipe, routed: _Routed, imatrix: Collection[str]) -> Iterator[PlannedTensor]:
    if not recipe.sidecar:
        for _, tensor in routed:
            yield PlannedTensor(tensor.name, recipe.high or tensor.type, HIGH, tensor)
    one = recipe.low if isinstance(recipe.low, GgmlType) else None
    suits_some = one is not None and any(_suits(one, tensor, imatrix) for _, tensor in routed)
    for part, tensor in routed:
        low = recipe.low if isinstance(recipe.low, GgmlType) else recipe.low[tensor.name]
        if one and suits_some and not _suits(one, tensor, imatrix):
            low = low_type_like(one, tensor, recipe.high or tensor.type)
        yield PlannedTensor(tier_tensor_name(part, LOW, 0), low, LOW, tensor)


def _suits(target: GgmlType, source: TensorInfo, imatrix: Collection[str]) -> bool:
    lacks_weights = target.wants_imatrix and source.name not in imatrix
    return target == source.type or (source.ne[0] % target.block == 0 and not lacks_weights)


def _check_type(tensor: PlannedTensor, imatrix: Collection[str]) -> None:
    if tensor.is_copy:
        return
    source, target = tensor.source, tensor.type
    if not source.type.quantizable:
        raise HobbitError(f"tensor {source.name!r} has type {source.type.name}, which cannot be converted")
    if source.ne[0] % target.block:
        fitting = "q8_0" if source.ne[0] % 32 == 0 else "f16"
        remedy = f"such as {fitting}" if tensor.tier == HIGH else "or leave --low out for one that fits"
        raise HobbitError(
            f"tensor {source.name!r} has rows of {source.ne[0]} values, which {target.name} cannot cut into "
            f"blocks of {target.block}: choose a type with smaller blocks, {remedy}"
        )
    if target.wants_imatrix and source.name not in imatrix:
        make_one = "make one with pyhobbit llama imatrix, pass --imatrix FILE"
        remedy = "the --imatrix file has none" if imatrix else make_one
        raise HobbitError(f"{target.name} needs an importance matrix for tensor {source.name!r}: {remedy}")
