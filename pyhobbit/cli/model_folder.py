# SPDX-License-Identifier: MIT
"""Lists the models of a folder for llama-server, which itself would list every GGUF in it."""

import os
from collections.abc import Mapping
from pathlib import Path

from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import EXACT, is_model_file, model_stem, split_name
from pyhobbit.model.model_file import model_parts
from pyhobbit.model.names import COMPANIONS, check_model_file
from pyhobbit.model.tiers import SIDECAR_ARCHITECTURE

Presets = dict[str, dict[str, str]]
"""Options of llama-server by the model's name."""

_CUT = "#;]\n\r"  # in a preset's file they end what stands before them


def find_models(folder: Path) -> tuple[Presets, list[str]]:
    """The models of a folder and of those in it, in the order of names, and why other files are none.

    A folder with one model gives it its name, and a single projector belongs to the models beside it.
    Raises HobbitError.
    """
    if not folder.is_dir():
        raise HobbitError(f"{folder} is not a folder; give one that holds GGUF files")
    problems: list[str] = []
    models: dict[Path, list[Path]] = {}
    projectors: dict[Path, list[Path]] = {}
    for path in sorted([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]):
        try:
            if _is_model(path):
                models.setdefault(path.parent, []).append(path)
            elif "mmproj" in path.name.lower():
                projectors.setdefault(path.parent, []).append(path)
        except (HobbitError, OSError) as e:
            problems.append(str(e) if isinstance(e, HobbitError) else f"{path}: {e.strerror}")
    presets: Presets = {}
    for parent, paths in models.items():
        beside = projectors.get(parent, []) if parent != folder else []
        for path in paths:
            name = parent.name if parent != folder and len(paths) == 1 else model_stem(path)
            text = name + "".join(map(str, [path.absolute(), *beside]))
            if name in presets:
                problems.append(f"{path} has the name of another model, {name}; rename one")
            elif any(each in text for each in _CUT):
                problems.append(f"{path} has one of the characters #;] in its path; rename it")
            else:
                projector = {"mmproj": str(beside[0].absolute())} if len(beside) == 1 else {}
                presets[name] = {"model": str(path.absolute()), **projector}
    for name in presets:
        if name + EXACT not in presets:
            presets[name]["alias"] = name + EXACT
    return presets, problems


def _is_model(path: Path) -> bool:
    """False for what comes with a model. Raises HobbitError, OSError for a file that cannot be one."""
    split = split_name(path)
    if split is not None and split[1] > 1:
        if not path.with_name(f"{split[0]}-00001-of-{split[2]:05d}.gguf").exists():
            raise HobbitError(f"{path} is a part of a model whose first part is missing")
        return False
    if path.name.endswith(COMPANIONS) or not is_model_file(path):
        return False
    check_model_file(path)
    return model_parts(path)[0].get("general.architecture", "") != SIDECAR_ARCHITECTURE


def preset_file(presets: Mapping[str, Mapping[str, str]]) -> str:
    """The path of a file for --models-preset, which exists as long as this process and its successors."""
    file = os.memfd_create("models", 0)  # stays open in the program that this process becomes
    for name, options in presets.items():
        os.write(file, "".join([f"[{name}]\n", *(f"{k} = {v}\n" for k, v in options.items())]).encode())
    return f"/proc/self/fd/{file}"
