# SPDX-License-Identifier: MIT
"""The model of a repository that a user means: one for all verbs, before and after the download."""

import re
from collections.abc import Collection, Sequence
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


def label(file: str, models: Collection[str] = ()) -> str:
    """How a user tells a file from the others of its repository: the QUANT in USER/NAME:QUANT.

    The label is the file's path if no name has a quantisation, or if another of the models has the same.
    """
    found = _label(file)
    return file if found is None or sum(_label(each) == found for each in models) > 1 else found


def _label(file: str) -> str | None:
    """The end of the file's name, or of its folder's, from the quantisation on; None without one."""
    names = model_stem(Path(file)), Path(file).parent.name
    return next((name[quant.start() :] for name in names if (quant := QUANT.search(name))), None)


def matching(models: Sequence[str], tag: str) -> list[str]:
    """The models that a tag names: by path or label in full, else those that hold it as a whole word."""
    if tag in models:
        return [tag]
    names = {file: (file, Path(file).name, _label(file) or file) for file in models}
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
