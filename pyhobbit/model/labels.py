# SPDX-License-Identifier: MIT
"""The model of a repository that a user means: one for all verbs, before and after the download."""

import re
from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path

from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import QUANT, is_gguf, is_model_name, model_stem, split_name


def is_first(file: str) -> bool:
    """Tells if it is a GGUF, and no later part of one."""
    split = split_name(Path(file))
    return is_gguf(file) and (not split or split[1] == 1)


def is_model(file: str) -> bool:
    """Tells if a path names the first or only file of a model."""
    return is_first(file) and is_model_name(Path(file).name)


def label(repo: str, file: str, models: Collection[str] = ()) -> str:
    """How a user tells a file from the others of its repository: the QUANT in USER/NAME:QUANT.

    Words that the names of file and repository begin with are left out. The label is the file's path if its
    name tells nothing else, or if another of the models has the same.
    """
    found = _label(repo, file)
    return file if found is None or sum(_label(repo, each) == found for each in models) > 1 else found


def _label(repo: str, file: str) -> str | None:
    stem = model_stem(Path(file))
    quant = QUANT.search(stem)
    marks = quant.start() if quant else 0
    folder = Path(file).parent.name
    if quant is None and (quant := QUANT.search(folder)):
        stem = folder
    known = re.split(r"[-_.]", repo.rpartition("/")[2].lower())
    words = re.finditer(r"([^-_.]*)(?:[-_.]+|$)", stem)
    same = takewhile(lambda pair: pair[0][1].lower() == pair[1], zip(words, known, strict=False))
    start = max((word.end() for word, _ in same), default=0)
    if quant is not None:
        start = min(start, quant.start()) or marks
    return stem[start:] or None if start or quant else None


def matching(repo: str, models: Sequence[str], tag: str) -> list[str]:
    """The models that a tag names: by path or label in full, else those that hold it as a whole word."""
    if tag in models:
        return [tag]
    names = {file: (file, Path(file).name, _label(repo, file) or file) for file in models}
    for form in (str, str.lower):
        if exact := [file for file in models if form(tag) in map(form, names[file])]:
            return exact
    tag = tag.lower()
    stems = {file: str(Path(file).with_name(model_stem(Path(file)))).lower() for file in models}
    word = re.compile(rf"(?<!\w){re.escape(tag)}(?!\w)")
    found = [file for file in models if word.search(stems[file])]
    # M-Compact beside M-I-Compact: it is named by the tag after what all names begin with
    plain = [
        file
        for file in found
        if stems[file].endswith(tag)
        and all(stems[each].startswith(stems[file].removesuffix(tag)) for each in found)
    ]
    return plain or found


def the_one(repo: str, models: Sequence[str], tag: str) -> str:
    """The model that a tag names. Raises HobbitError where it names none or several."""
    found = matching(repo, models, tag)
    if len(found) == 1:
        return found[0]
    labels = ", ".join(label(repo, file, models) for file in found or models)
    if found:
        raise HobbitError(f"{repo}:{tag} names several models; give one of {labels}")
    raise HobbitError(f"{repo} has no {tag}; it has {labels}")
