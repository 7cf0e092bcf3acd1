# SPDX-License-Identifier: MIT
"""The quantisation of a repository that suits this machine, by the sizes of its files and a header.

The speed is an estimate: a token reads its weights from memory, and those of its experts that are not there
from the disk.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from pyhobbit.errors import HobbitError, LoadError
from pyhobbit.model.download import Repo, UnreachableError, is_complete, models_of, own_parts
from pyhobbit.model.file_names import label
from pyhobbit.model.gguf_file import GgufFile
from pyhobbit.model.tiers import routed_part, tiered_part
from pyhobbit.model.token_time import TokenTime
from pyhobbit.native.files import os_errors, temporary_file, write_text
from pyhobbit.native.machine import measure_disk, memory_limit
from pyhobbit.settings.config import format_size
from pyhobbit.settings.table import default

_BESIDE = 1 << 30  # bytes of libraries, a context of some thousand tokens and what computes a prompt
_TAKEN = 0.9  # share of the memory, as of what is free
_MEMORY_SPEED = 40e9  # bytes per second; two channels of a small machine, which vary less than disks
_EXPONENT = 2.0  # TokenTime.exponent; two recorded models had it (docs/policies.md)
_ENOUGH = 5.0  # token/s: about as fast as people read
_MOST_BITS = 7.5  # per weight; more than Q6_K hardly answers better
_PROBE_BYTES, _READ_BYTES = 1 << 27, 1 << 21


@dataclass(frozen=True)
class Machine:
    """This machine. memory: bytes that a model may take.  disk: bytes per second that it reads."""

    memory: float
    disk: float


@dataclass(frozen=True)
class Weights:
    """Bytes of the routed experts, of the rest, which stays in memory, and of the experts of a token.

    table: bytes of which a token looks up some rows, so that they stay on disk.  n: number of all weights.
    """

    experts: float
    rest: float
    used_experts: float
    table: float
    n: float

    def scaled(self, size: float) -> "Weights":
        """About those of another quantisation of `size` bytes: makers vary the experts more than the rest."""
        growth = math.sqrt(size / (self.experts + self.rest + self.table))
        experts = max(0.0, size - (self.rest + self.table) * growth)
        used = self.used_experts / self.experts * experts
        return Weights(experts, self.rest * growth, used, self.table * growth, self.n)

    def share(self, memory: float) -> float:
        """Share of the experts that finds room; below 0 where not even a token's do."""
        return min(1.0, (memory - _BESIDE - self.rest - self.used_experts) / max(1.0, self.experts))

    def speed(self, machine: Machine) -> float:
        """Expected token/s; 0 where the model does not fit."""
        compute_s = (1 + self.rest + self.used_experts) / _MEMORY_SPEED
        share = self.share(machine.memory)
        time = TokenTime(compute_s, self.used_experts / machine.disk, _EXPONENT)
        return time.rate(share) if share >= 0 else 0.0


@dataclass(frozen=True)
class Choice:
    """A quantisation. size: bytes of all files.  share: of experts in memory.  speed: token/s or 0."""

    label: str
    size: int
    bits_per_weight: float
    share: float
    speed: float


def this_machine(memory: int | None = None, disk: int | None = None) -> Machine:
    """Measures memory and disk unless given, in bytes (per second); keeps the disk's. Raises HobbitError."""
    return Machine(memory or _TAKEN * memory_limit(), disk or _disk_speed())


def _disk_speed() -> float:
    kept = Path(constants.HF_HOME) / "pyhobbit-disk-speed"
    with suppress(OSError, ValueError):
        return float(kept.read_text("utf-8"))
    with os_errors(f"the disk's speed cannot be measured in {kept.parent}", "; name a QUANT"):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(kept) as probe:
            with probe.open("wb") as file:
                file.write(os.urandom(_PROBE_BYTES))
                os.fsync(file.fileno())
            speed = measure_disk(probe, _READ_BYTES, default("io_threads"), seconds=0.5).bytes_per_s
        write_text(kept, f"{speed:.0f}")
    return speed


def weights_of(files: Sequence[GgufFile], size: float) -> Weights:
    """Weights by the headers of a model's files of `size` bytes; a dense one has no experts."""
    keys = files[0].metadata
    used = next((keys[key].value() for key in keys if key.endswith(".expert_used_count")), 0)
    tensors = [tensor for file in files for tensor in file.tensors]
    tables = {"per_layer_token_embd.weight"}
    if any(tensor.name == "output.weight" for tensor in tensors):
        tables.add("token_embd.weight")
    experts = used_experts = table = 0.0
    for tensor in tensors:
        if part := routed_part(tensor.name):
            experts += tensor.nbytes
            n_used = used[min(part.layer, len(used) - 1)] if isinstance(used, list) else used
            used_experts += tensor.nbytes * n_used / tensor.ne[-1]
        elif tensor.name in tables or tiered_part(tensor.name):
            table += tensor.nbytes
    total = sum(tensor.nbytes for tensor in tensors)
    n, unit = sum(tensor.n_values for tensor in tensors), size / max(1, total)
    figures = (experts, total - experts - table, used_experts, table, n)
    return Weights(*(each * unit for each in figures))


def choices(repo: Repo, files: Mapping[str, int], machine: Machine) -> list[Choice]:
    """The quantisations of its MoE model, the smallest first. files: Repo.sizes(). Raises HobbitError."""
    models = models_of(repo, files)
    complete = [file for file in models if is_complete(file, files)] or models[:1]
    parts = {file: own_parts(repo.name, file, files) for file in complete}
    sizes = {file: sum(files[part] for part in parts[file]) for file in parts}
    labels = {file: label(file, models) for file in parts}

    def rank(file: str) -> tuple[int, float]:  # few requests, and exact figures where memory ends
        return len(parts[file]), abs(math.log((1 + sizes[file]) / machine.memory))

    headers: dict[str, list[GgufFile]] = {}
    errors: list[LoadError] = []

    def loads(file: str) -> bool:
        try:
            headers[file] = headers.get(file) or repo.check(file, files)
        except LoadError as e:
            print(f"pyhobbit: left out  {e}", file=sys.stderr)
            errors.append(e)
            del sizes[file]
        return file in headers

    while sizes:  # until the recommended one can be loaded
        if loads(read := min(sizes, key=rank)):
            known = weights_of(headers[read], sizes[read])
            if not known.experts:
                texts = ", ".join(f"{labels[file]} ({format_size(size)})" for file, size in sizes.items())
                raise HobbitError(f"{repo.name} is dense, so all of it must fit into memory; it has {texts}")
            found = {_choice(labels[file], size, known, machine): file for file, size in sizes.items()}
            ordered = sorted(found, key=lambda each: each.size)
            if not any(each.speed for each in found) or loads(found[best(ordered)]):
                return ordered
    raise errors[0]


def _choice(name: str, size: int, known: Weights, machine: Machine) -> Choice:
    weights = known.scaled(size)
    share = max(0.0, weights.share(machine.memory))
    return Choice(name, size, 8 * size / known.n, share, weights.speed(machine))


def best(found: Sequence[Choice]) -> Choice:
    """The largest of those that are fast enough, else the fastest. Raises HobbitError where none fits."""
    fitting = [each for each in found if each.speed]
    if not fitting:
        least = f"{found[0].label} with {format_size(found[0].size)}"
        raise HobbitError(
            f"no QUANT fits into memory, not even {least}; name one to download it all the same"
        )
    useful = [each for each in fitting if each.bits_per_weight <= _MOST_BITS] or fitting[:1]
    enough = [each for each in useful if each.speed >= _ENOUGH]
    return enough[-1] if enough else max(useful, key=lambda each: each.speed)


def reason(found: Sequence[Choice], machine: Machine) -> str:
    """The one to take, and why. Raises HobbitError where none fits."""
    chosen = best(found)
    why = "the best that reaches" if chosen.speed >= _ENOUGH else "the fastest, since none reaches"
    return (
        f"{chosen.label} is {why} {_ENOUGH:g} token/s with {format_size(machine.memory)} of memory and "
        f"{format_size(machine.disk)}/s from the disk, by estimate: {chosen.speed:.4g} token/s; more than "
        f"{_MOST_BITS:g} bits per weight are not recommended"
    )


def recommended(name: str) -> str:
    """USER/NAME[:QUANT] for USER/NAME: what is downloaded already, else what suits this machine.

    Standard error says why. USER/NAME alone without a network or advice. Raises HobbitError.
    """
    repo = Repo(name)
    try:
        files = repo.sizes()
    except UnreachableError:
        return name
    models = models_of(repo, files)
    there = [file for file in models if repo.cached(file)]
    if len(there) == 1 or len(models) == 1:
        return f"{name}:{(there or models)[0]}"
    machine = this_machine()
    try:
        found = choices(repo, files, machine)
    except LoadError:
        raise
    except HobbitError as e:
        print(f"pyhobbit: {e}", file=sys.stderr)
        return name
    print(f"pyhobbit: {reason(found, machine)}", file=sys.stderr)
    return f"{name}:{best(found).label}"
