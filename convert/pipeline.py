# SPDX-License-Identifier: MIT
"""The steps of a conversion in their order: read, plan, write, verify."""

import errno
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gguf import GGUFValueType

from pyhobbit.convert import checkpoint
from pyhobbit.convert.imatrix import Imatrix, read_imatrix
from pyhobbit.convert.options import Options
from pyhobbit.convert.partial import SUFFIX, check_drop_high, drop_high
from pyhobbit.convert.plan import RESIDENT, Plan, PlannedTensor, Recipe, make_plan
from pyhobbit.convert.read import check_routed, read_model
from pyhobbit.convert.write import NotFiniteError, Progress, verify_output, write_output
from pyhobbit.errors import HobbitError
from pyhobbit.model import tiers
from pyhobbit.model.file_names import model_stem, sidecar_path
from pyhobbit.model.gguf_file import GgufFile, KeyValue, TensorInfo, pack_header, scalar_entry, tensor_nbytes
from pyhobbit.model.long_work import check_room, progress_bar
from pyhobbit.model.model_file import opened_info
from pyhobbit.model.quantize import GgmlType, type_by_name
from pyhobbit.native.files import atomic_output, temporary_file
from pyhobbit.settings.config import CacheConfig, format_size
from pyhobbit.settings.resolve import check_settings

_METADATA_BYTES = 32 << 20  # allowed for while the metadata of a checkpoint are not known yet
_ELSEWHERE = "-o FILE writes elsewhere"


def convert(options: Options) -> Path | None:
    """Makes the GGUF and returns its path; `dry_run` only prints. Raises HobbitError and leaves no file."""
    _check_options(options)
    output = _output_path(options)
    try:
        if options.drop_high is not None:
            return _drop_high(options, output, options.drop_high)
        if options.model.is_dir():
            return _convert_checkpoint(options, output)
        return _convert_gguf(options, output, read_model(options.model))
    except NotFiniteError as error:
        raise HobbitError(f"{error}: the model is damaged, download it or make it again") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HobbitError(
                f"the disk became full while {output} was written: make room and convert again"
            ) from error
        raise HobbitError(f"writing {output} failed: {error.strerror}; {_ELSEWHERE}") from error


def _check_options(options: Options) -> None:
    """Raises HobbitError for what is wrong whatever the model is."""
    if options.low is not None:
        type_by_name(options.low)
    high = high_tier(options.high)
    check_settings(CacheConfig(t1=options.t1, t2=options.t2).settings())
    check_drop_high(options)
    if options.threads < 1:
        raise HobbitError(f"--threads {options.threads}: at least 1 is needed")
    if options.sidecar and options.model.is_dir():
        raise HobbitError("--sidecar adds a tier to a GGUF, but MODEL is a folder: --split makes both")
    if high and (options.sidecar or (options.split and checkpoint.out_type(options.high) == "auto")):
        raise HobbitError("--sidecar keeps a model's experts, and --split its floats: drop --high")
    if options.split and not options.model.is_dir():
        raise HobbitError("--split is for a checkpoint, and MODEL is a GGUF: --sidecar adds a tier to it")


def _recipe(options: Options, tensors: Sequence[TensorInfo]) -> Recipe:
    high = high_tier(options.high)
    if options.low:
        return Recipe(type_by_name(options.low), high, options.sidecar or options.split)
    low = tiers.default_low_types(tensors, high)
    if low is None:
        routed = [(tensor, high or tensor.type) for tensor in tensors if tiers.routed_part(tensor.name)]
        n_bytes = sum(tensor_nbytes(own, tensor.ne) for tensor, own in routed)
        bits = 8 * n_bytes / sum(tensor.n_values for tensor, _ in routed)
        raise HobbitError(
            f"the experts have {bits:.3g} bits per weight already, and no usual type has half of them: "
            "name one with --low TYPE and an importance matrix, or convert a model in finer types"
        )
    return Recipe(low, high, options.sidecar or options.split)


def _notes(recipe: Recipe, plan: Plan, matrix: Path | None, imatrix: Imatrix) -> Iterator[str]:
    """Lines about what a user may not expect of the low tier."""
    low = plan.tier(tiers.LOW)
    others = [tensor for tensor in low if isinstance(recipe.low, GgmlType) and tensor.type != recipe.low]
    if others:
        types = "/".join(dict.fromkeys(tensor.type.name for tensor in others))
        yield f"note: {_some(others)}, in {types}: {recipe.low.name} does not suit them"
    lacking = [tensor for tensor in low if tensor.source.name not in imatrix]
    if matrix is not None and lacking:
        yield f"note: {matrix} has no values for {_some(lacking)}: all their inputs count alike"


def _some(tensors: Sequence[PlannedTensor]) -> str:
    return f"{len(tensors)} tensors, such as {tensors[0].source.name}"


def high_tier(wanted: str | None) -> GgmlType | None:
    """The type that --high names, None to keep the source's. Raises HobbitError if it is no type."""
    return None if wanted is None or wanted.lower() == "keep" else type_by_name(wanted)


def _output_path(options: Options) -> Path:
    model = options.model
    if not model.exists():
        raise HobbitError(f"{model} does not exist")
    output = options.output or _default_output(model, options)
    if output.is_dir() or not output.parent.is_dir():
        raise HobbitError(f"the output {output} must be a file name in an existing folder")
    if output.exists() and output.samefile(model):
        raise HobbitError(f"the output {output} is the model itself: choose another name")
    taken = [path for path in (output, sidecar_path(output))[: 1 + options.split] if path.exists()]
    if taken and not options.force and not options.dry_run:
        raise HobbitError(
            f"{taken[0]} exists already: choose another name with -o, or replace it with --force"
        )
    return output


def _default_output(model: Path, options: Options) -> Path:
    # A file may be a link into a cache of downloads: stay beside the link.
    model = model.resolve() if model.is_dir() else model.absolute()
    if not model.name:
        raise HobbitError(f"{model} is no model: name a GGUF file or the folder of a checkpoint")
    if options.sidecar:
        return sidecar_path(model)
    suffix = "" if options.split else "-hobbit" if options.drop_high is None else SUFFIX
    return model.with_name(f"{model_stem(model)}{suffix}.gguf")


def _convert_checkpoint(options: Options, output: Path) -> Path | None:
    out_type = checkpoint.out_type(options.high)
    print(f"listing the tensors of {options.model}", file=sys.stderr)
    listed = checkpoint.list_tensors(options.model, out_type)
    tensors = listed.tensors
    check_routed(options.model, tensors)
    imatrix = _imatrix(options, tensors)
    recipe = _recipe(options, tensors)
    plan = make_plan(tensors, recipe, imatrix)
    intermediate_bytes = sum(tensor.nbytes for tensor in tensors) + _METADATA_BYTES
    needed = intermediate_bytes + plan.data_bytes + _METADATA_BYTES
    if options.dry_run:
        _print_plan(plan, output, needed, options.imatrix, _notes(recipe, plan, options.imatrix, imatrix))
    _check_saving(plan, tensors, options)
    if options.dry_run:
        return None
    check_room(output.parent, needed, _ELSEWHERE)
    try:
        return _convert_as(options, output, listed, out_type)
    except NotFiniteError as error:
        if out_type == "f32" or (options.high or "").lower() in ("f16", "bf16"):
            raise HobbitError(f"{error}: convert with --high bf16, or f32") from error
        print(f"note: {error}; reading the checkpoint as bf16", file=sys.stderr)
    return _convert_as(options, output, listed, "bf16")


def _convert_as(options: Options, output: Path, listed: checkpoint.Listed, out_type: str) -> Path | None:
    tensors, has_mtp = listed
    place = temporary_file(output.with_name(f"{output.name}.checkpoint"))  # never renamed: it always vanishes
    with atomic_output(output, options.force) if options.split else place as intermediate:
        with _progress("reading", sum(tensor.nbytes for tensor in tensors)) as progress:
            checkpoint.write_gguf(options.model, out_type, has_mtp, intermediate, progress)
        if not options.split:
            return _convert_gguf(options, output, read_model(intermediate))
        own = replace(options, model=output, split=False, sidecar=True)
        _convert_gguf(own, sidecar_path(output), replace(read_model(intermediate), path=output))
    print(f"wrote {output}, as llama.cpp's converter does", file=sys.stderr)
    return output


def _convert_gguf(options: Options, output: Path, model: GgufFile) -> Path | None:
    recipe = _recipe(options, model.tensors)
    imatrix = _imatrix(options, model.tensors)
    plan = make_plan(model.tensors, recipe, imatrix)
    thresholds = _thresholds(options)
    metadata = output_metadata(model, recipe, thresholds)
    notes = list(_notes(recipe, plan, options.imatrix, imatrix))
    if thresholds:
        texts = " and ".join(f"{entry.key.removeprefix('hobbit.')} {entry.value():g}" for entry in thresholds)
        notes.append(f"{texts} are stored: it runs in mixed precision, and in high by --quality lossless")
    if options.dry_run:
        _print_plan(plan, output, _output_bytes(plan, metadata), options.imatrix, notes)
    _check_saving(plan, model.tensors, options)
    if options.dry_run:
        return None
    if output.exists() and any(output.samefile(tensor.path) for tensor in model.tensors):
        raise HobbitError(f"the output {output} is one of the files to convert: choose another name")
    _write(options, output, plan, metadata, imatrix)
    matrix = [f"importance matrix {options.imatrix}"] if options.imatrix else []
    _report(options, output, "\n".join([_tier_summary(plan), *matrix, *notes]))
    return output


def _drop_high(options: Options, output: Path, share: float | str) -> Path | None:
    """All is copied: the calibration beside the model says what is left out."""
    plan, metadata, loss = drop_high(options.model, share, options.once)
    if options.dry_run:
        _print_plan(plan, output, _output_bytes(plan, metadata), None, [loss])
        return None
    _write(options, output, plan, metadata, {})
    remaining = output.stat().st_size / options.model.stat().st_size
    _report(options, output, f"{remaining:.0%} of {options.model}\n{loss}")
    return output


def _output_bytes(plan: Plan, metadata: Sequence[KeyValue]) -> int:
    return len(pack_header(metadata, plan.placements(), tiers.ALIGNMENT)) + plan.data_bytes


def _write(
    options: Options, output: Path, plan: Plan, metadata: Sequence[KeyValue], imatrix: Imatrix
) -> None:
    """Writes the output and reads it back. Raises HobbitError, OSError."""
    check_room(output.parent, _output_bytes(plan, metadata), _ELSEWHERE)
    with atomic_output(output, options.force) as temporary:
        with _progress("converting", plan.read_bytes) as progress:
            written = write_output(temporary, plan, metadata, imatrix, options.threads, progress)
        with _progress("verifying", sum(piece.size for piece in written)) as progress:
            verify_output(temporary, plan, written, options.threads, progress)
        if options.drop_high is not None:  # the engine may lack this version of the format
            opened_info(temporary, {"hobbit.enable": True, "hobbit.calibrated": False})


def _report(options: Options, output: Path, summary: str) -> None:
    """Says what was written, and which commands may follow."""
    model = shlex.quote(str(options.model if options.sidecar else output))
    if options.sidecar and output.absolute() != _default_output(options.model, options):
        model += f" --sidecar {shlex.quote(str(output))}"
    calibrates = "" if options.once else f"pyhobbit calibrate {model} --text FILE\n  or: "
    print(
        f"wrote {output}: {format_size(output.stat().st_size)}, {summary}\n"
        f"next: {calibrates}pyhobbit chat {model}{'' if _thresholds(options) else ' --quality small-loss'}",
        file=sys.stderr,
    )


def _imatrix(options: Options, tensors: Sequence[TensorInfo]) -> Imatrix:
    """The values of --imatrix. Raises HobbitError."""
    return {} if options.imatrix is None else read_imatrix(options.imatrix, tensors)


def _thresholds(options: Options) -> list[KeyValue]:
    """The keys by which the output runs in mixed precision; none for all high."""
    t2 = 1.0 if options.t2 is None else options.t2
    t1 = min(options.default_t1, t2) if options.t1 is None else options.t1
    stored = {"hobbit.t1": t1, "hobbit.t2": t2} if t1 < 1 else {}
    return [scalar_entry(key, GGUFValueType.FLOAT64, value) for key, value in stored.items()]


def output_metadata(model: GgufFile, recipe: Recipe, thresholds: Sequence[KeyValue]) -> list[KeyValue]:
    if recipe.sidecar:
        return [*tiers.sidecar_metadata(model), *thresholds]
    own = (tiers.ALIGNMENT_ENTRY, *tiers.tier_metadata(), *thresholds)
    # a key stays where the source had it
    return [*{**model.metadata, **{entry.key: entry for entry in own}}.values()]


@contextmanager
def _progress(what: str, total: int) -> Iterator[Progress]:
    with progress_bar(what, total, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield lambda n: bar.update(min(n, total - bar.n))  # a checkpoint's metadata are not in the total


def _print_plan(plan: Plan, output: Path, needed: int, imatrix: Path | None, notes: Iterable[str]) -> None:
    print(f"{'tier':<10}{'type':<20}{'tensors':>8}{'size':>14}")
    for tier in (RESIDENT, tiers.HIGH, tiers.LOW):
        tensors = plan.tier(tier)
        for name in dict.fromkeys(tensor.type.name for tensor in tensors):
            sizes = [tensor.nbytes for tensor in tensors if tensor.type.name == name]
            print(f"{tier:<10}{name:<20}{len(sizes):>8}{format_size(sum(sizes)):>14}")
    print(f"{'total':<30}{len(plan.tensors):>8}{format_size(plan.data_bytes):>14}")
    free = shutil.disk_usage(output.parent).free
    enough = "" if free >= needed else ": not enough"
    print(f"output {output}; disk space {format_size(needed)} needed, {format_size(free)} free{enough}")
    print("\n".join([f"importance matrix {imatrix or 'none'}", *notes]))


def _check_saving(plan: Plan, tensors: Sequence[TensorInfo], options: Options) -> None:
    """Raises HobbitError for a low tier that saves too little, unless forced. `tensors`: of the model."""
    own = sum(tensor.nbytes for tensor in tensors if tiers.routed_part(tensor.name))
    share = plan.tier_bytes(tiers.LOW) / (plan.tier_bytes(tiers.HIGH) or own)
    if share > tiers.MOST_LOW and not options.force:
        default = options.low and tiers.default_low_types(tensors, high_tier(options.high))
        leave_out = "leave out --low, " if default else ""
        raise HobbitError(
            f"the low tier would have {share:.0%} of the high tier's bytes and save little: choose one of at "
            f"most {tiers.MOST_LOW:.0%}, {leave_out}or insist with --force"
        )


def _tier_summary(plan: Plan) -> str:
    parts = []
    for tier in (tiers.HIGH, tiers.LOW):
        if tensors := plan.tier(tier):
            types = "/".join(dict.fromkeys(tensor.type.name for tensor in tensors))
            parts.append(f"{tier} tier {types} {format_size(plan.tier_bytes(tier))}")
    return ", ".join(parts)
