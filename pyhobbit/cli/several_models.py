# SPDX-License-Identifier: MIT
"""Lists several models for llama-server: all downloads, or those of a folder, where it takes every GGUF."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pyhobbit.cli import server_flags
from pyhobbit.cli.server_flags import value
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model import file_names
from pyhobbit.model.names import models_below
from pyhobbit.settings.config import CacheConfig, format_size

Presets = dict[str, dict[str, str]]
"""Options of llama-server by the model's name."""

SOURCES = ("--models-dir", "--models-preset")
"""Options of llama-server that name several models."""

_CUT = "#;]\n\r"  # in a preset's file they end what stands before them


def find_models(folder: Path) -> tuple[Presets, list[str]]:
    """The models of a folder and of those in it, in the order of paths, and why other files are none.

    A single projector in an inner folder belongs to the models beside it. Raises HobbitError.
    """
    found, problems = models_below(folder, "*", "*/*")
    presets: Presets = {}
    for path in found:
        name = file_names.model_stem(path)
        beside = sorted(path.parent.glob("*mmproj*.gguf")) if path.parent != folder else []
        if name in presets:
            problems.append(f"{path} has the name of another model, {name}; rename one")
        elif any(each in "".join(map(str, [path.absolute(), *beside])) for each in _CUT):
            problems.append(f"{path} has one of the characters #;] in its path; rename it")
        else:
            projector = {"mmproj": str(beside[0].absolute())} if len(beside) == 1 else {}
            presets[name] = {"model": str(path.absolute()), **projector}
        if (toml := file_names.options_path(path)).exists():
            problems.append(f"{toml}: the models of a folder take their options from the command line")
    return _with_exact(presets), problems


def _with_exact(presets: Presets) -> Presets:
    """The presets, each with its second name, which asks for exact answers."""
    for name in presets:
        if name + file_names.EXACT not in presets:
            presets[name]["alias"] = name + file_names.EXACT
    return presets


def preset_file(presets: Mapping[str, Mapping[str, str]]) -> str:
    """The path of a file for --models-preset, as long as this process lives; prints the names."""
    print(f"pyhobbit: names     {', '.join(presets)}", file=sys.stderr)
    file = os.memfd_create("models", 0)  # stays open in the program that this process becomes
    for name, options in presets.items():
        os.write(file, "".join([f"[{name}]\n", *(f"{k} = {v}\n" for k, v in options.items())]).encode())
    return f"/proc/self/fd/{file}"


def all_downloads() -> list[str]:
    """--models-preset with all that `pyhobbit list` shows, or nothing where there is none."""
    # huggingface_hub takes a while
    from pyhobbit.model.downloaded import downloaded_models, models_of_programs

    models = [*downloaded_models(), *models_of_programs()]
    presets = _with_exact({each.name: {"model": str(each.path.absolute())} for each in models})
    return ["--models-preset", preset_file(presets)] if presets else []


def listed(passed_on: Sequence[str]) -> list[str]:
    """With exactly the models of --models-dir, unless presets are given as well. Raises HobbitError."""
    folder = value("--models-dir", passed_on)
    if folder is None or value("--models-preset", passed_on) is not None:
        return [*passed_on]
    presets, problems = find_models(Path(folder))
    for problem in problems:
        print(f"pyhobbit: skipped   {problem}", file=sys.stderr)
    if not presets:
        raise HobbitError(f"{folder} holds no model; without --models-dir, serve has all of pyhobbit list")
    os.environ.pop("LLAMA_ARG_MODELS_DIR", None)
    return [*server_flags.without("--models-dir", passed_on)[0], "--models-preset", preset_file(presets)]


def rows(total: int | None, each: int | None, passed_on: Sequence[str]) -> dict[str, str]:
    """Describes the models for people; no rows where there is one.  total, each: bounds on memory."""
    folder = next(filter(None, (value(name, passed_on) for name in SOURCES)), None)
    if folder is None:
        return {}
    folder = "pyhobbit list" if folder.startswith("/proc/") else folder
    most = value("--models-max", passed_on)
    found = {"models": f"those of {folder}, {'one' if most == '1' else f'at most {most}'} at a time"}
    if total is not None and each is not None:
        share = "" if each == total else f", {format_size(each)} for each model"
        found["memory"] = f"up to {format_size(total)} by --memory{share}"
    return found


def shared(cache: CacheConfig, passed_on: Sequence[str]) -> tuple[CacheConfig, Sequence[str]]:
    """The settings of each model, and the arguments: loaded ones share --memory. Raises ConfigError."""
    if all(value(name, passed_on) is None for name in SOURCES):
        return cache, passed_on
    most = value("--models-max", passed_on)
    if most is None:
        return cache, [*passed_on, "--models-max", "1"]
    if cache.memory is None:
        return cache, passed_on
    if not most.isdecimal() or int(most) == 0:
        raise ConfigError("the loaded models share --memory; give --models-max a number of at least 1")
    return replace(cache, memory=cache.memory // int(most)), passed_on
