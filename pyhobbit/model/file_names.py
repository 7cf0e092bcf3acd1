# SPDX-License-Identifier: MIT
"""How a model's files are named, which files are no model, and which one is meant. Imports nothing large."""

import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from pyhobbit.errors import HobbitError
from pyhobbit.native.files import open_regular

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_PIECE = re.compile(r"(.+\.gguf)\.(?:part|split)-?(?:\d+of\d+|\d+|[a-z]{1,2})", re.IGNORECASE)
_QUANT = r"(?:I?Q\d\w*|TQ\d\w*|(?:MX|NV)FP\d\w*|BF16|FP?16|FP?32)(?![^\W_])"
QUANT = re.compile(rf"(?<![^\W_])(?:(?:UD|i1?)-)?{_QUANT}", re.IGNORECASE)
"""A quantisation in a name, with the marks that makers put before it."""

EXACT = "-exact"
"""Ends a model's second name, under which a server answers in high precision alone."""

MISTRALS_OWN = (
    "{} is in Mistral's own form (params.json, consolidated.safetensors): take the model in the form of "
    "Hugging Face, with config.json and model.safetensors"
)

# The place of a mark decides: "M-imatrix-Q4_K_M" and "M-mtp-Q6_K" are models.
_DRAFT = r"(?:mtp|eagle3?|dflash|dspark|draft)(?![^\W_]).*"
_PROJECTOR = rf"mmproj(?![^\W_]).*|.*(?<![^\W_])mmproj(?:[-_.](?:model|{_QUANT}))*"
_MATRIX = rf"imatrix(?![^\W_]).*|.*\.imatrix|(?!.*{QUANT.pattern}).*[-_]imatrix"
CALIBRATION = ".calibration.gguf"
COMPANIONS = (".hobbit.gguf", CALIBRATION)
"""Endings of the files beside a model: its sidecar and its calibration."""

# Values of general.type and general.architecture, which stand at a header's start.
_HEADER_BYTES = 1 << 16
OWN_TYPES = {b"hobbit-sidecar": "further tiers", b"hobbit-calibration": "settings"}
_OTHER_TYPES = (*b"mmproj clip imatrix adapter controlvector eagle3 dflash".split(), *OWN_TYPES)
_OTHERS = b"|".join(re.escape(bytes([len(each)]) + bytes(7) + each) for each in _OTHER_TYPES)
_OTHER_HEADER = re.compile(rb"general\.(?:type|architecture)\x08\0{3}(?:%b)" % _OTHERS)


def is_gguf(path: str | Path) -> bool:
    """Tells by the ending, in any case."""
    return str(path).lower().endswith(".gguf")


def raw_pieces(names: Iterable[str]) -> dict[str, list[str]]:
    """The raw pieces of GGUFs among the names, such as M.gguf.part1of2, by the name of the whole."""
    pieces: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda each: (len(each), each)):
        if match := _PIECE.fullmatch(name):
            pieces.setdefault(match[1], []).append(name)
    return pieces


def in_pieces(whole: str, pieces: Sequence[str]) -> str:
    """The sentence about such a GGUF."""
    return f"{whole} lies in {len(pieces)} pieces; join them with: cat {' '.join(pieces)} > {whole}"


def split_name(path: Path) -> tuple[str, int, int] | None:
    """Prefix, number (from 1) and count of a file named like a split of a model; None for other names."""
    match = _SPLIT.fullmatch(path.name)
    return (match[1], int(match[2]), int(match[3])) if match else None


def part_names(name: str) -> list[str]:
    """All parts of the split model that one is of, in order; the name itself where it is none's."""
    if (match := _SPLIT.fullmatch(name)) is None:
        return [name]
    return [f"{match[1]}-{i:05d}-of-{match[3]}{match[4]}" for i in range(1, int(match[3]) + 1)]


def model_stem(model: Path) -> str:
    """The name of a model's file without .gguf and without the number of a split."""
    split = split_name(model)
    return split[0] if split else model.name[:-5] if is_gguf(model) else model.name


def is_model_name(name: str) -> bool:
    """False for the name of a companion, a draft, a projector or an importance matrix in GGUF."""
    if name.lower().endswith(COMPANIONS):
        return False
    return not re.fullmatch(f"{_DRAFT}|{_PROJECTOR}|{_MATRIX}", model_stem(Path(name)), re.IGNORECASE)


def is_model_file(path: Path) -> bool:
    """The same by the header where it can be read and tells; that of a draft is like its model's."""
    head = b""
    with suppress(OSError):
        head = read_head(path)
    if b"general.architecture" not in head:
        return not is_other(head) and is_model_name(path.name)
    is_named = path.name.lower().endswith(COMPANIONS) or re.fullmatch(_DRAFT, model_stem(path), re.IGNORECASE)
    return not (is_other(head) or is_named)


def read_head(path: Path) -> bytes:
    """Reads the bytes that tell the kind of a GGUF. Raises OSError."""
    with open_regular(path) as file:
        return file.read(_HEADER_BYTES)


def is_other(head: bytes) -> bool:
    """True for what comes with a model, from read_head()."""
    return _OTHER_HEADER.search(head) is not None


def sidecar_path(base: Path) -> Path:
    """The path at which the engine looks for the sidecar of a model."""
    return base.with_name(model_stem(base) + ".hobbit.gguf")


def calibration_path(base: Path) -> Path:
    """The path at which the engine looks for the calibration of a model."""
    return base.with_name(model_stem(base) + ".calibration.gguf")


def options_path(base: Path) -> Path:
    """The file of a model's own options (pyhobbit.model.options_file)."""
    return base.with_name(model_stem(base) + ".toml")


# --- the models of a repository, before and after the download


def is_first(file: str) -> bool:
    """Tells if it is a GGUF, and no later part of one."""
    split = split_name(Path(file))
    return is_gguf(file) and (not split or split[1] == 1)


def is_model(file: str) -> bool:
    """Tells if a path names the first or only file of a model."""
    return is_first(file) and is_model_name(Path(file).name)


def label(file: str, models: Collection[str] = ()) -> str:
    """How a user tells a file from the others of its repository: the QUANT in USER/NAME:QUANT.

    The label is the file's path if no name has a quantisation, or if another of the models has the same.
    """
    found = _quantisation(file)
    return file if found is None or sum(_quantisation(each) == found for each in models) > 1 else found


def _quantisation(file: str) -> str | None:
    """The end of the file's name, or of its folder's, from the quantisation on; None without one."""
    names = model_stem(Path(file)), Path(file).parent.name
    return next((name[quant.start() :] for name in names if (quant := QUANT.search(name))), None)


def matching(models: Sequence[str], tag: str) -> list[str]:
    """The models that a tag names: by path or label in full, else those that hold it as a whole word."""
    if tag in models:
        return [tag]
    names = {file: (file, Path(file).name, _quantisation(file) or file) for file in models}
    for form in (str, str.lower):
        if exact := [file for file in models if form(tag) in map(form, names[file])]:
            return exact
    word = re.compile(rf"(?<!\w){re.escape(tag)}(?!\w)", re.IGNORECASE)
    return [file for file in models if word.search(str(Path(file).with_name(model_stem(Path(file)))))]


def the_one(repo: str, models: Sequence[str], tag: str) -> str:
    """The model that a tag names. Raises HobbitError where it names none or several."""
    found = matching(models, tag)
    if len(found) == 1:
        return found[0]
    labels = ", ".join(label(file, models) for file in found or models)
    if found:
        raise HobbitError(f"{repo}:{tag} names several models; give one of {labels}")
    raise HobbitError(f"{repo} has no {tag}; it has {labels}")
