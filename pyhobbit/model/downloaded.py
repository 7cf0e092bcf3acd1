# SPDX-License-Identifier: MIT
"""The GGUF models in Hugging Face's cache, which all programs on huggingface_hub share, and in folders."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import CachedFileInfo, CachedRepoInfo, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from pyhobbit.errors import HobbitError
from pyhobbit.model import other_programs
from pyhobbit.model.download import is_complete, whole
from pyhobbit.model.file_names import is_first, is_model_file, label, matching, the_one
from pyhobbit.model.names import models_below, parse_repository

_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class LocalModel:
    """A model. name: what commands take as MODEL.  path: of its first file.  size: of all files, in bytes.

    last_used: seconds since 1970.  program: that has downloaded it.
    """

    name: str
    path: Path
    size: int
    last_used: float
    program: str = "Hugging Face"


def downloaded_models(cache: Path | None = None) -> list[LocalModel]:
    """Models by name. cache: default as huggingface_hub's, which HF_HOME changes."""
    models = []
    for repo in _repositories(cache):
        files = _files(repo)
        chosen = _models(files)
        for first in chosen:
            parts = [files[name][0] for name in whole(repo.repo_id, first, files)]
            models.append(
                LocalModel(
                    name=f"{repo.repo_id}:{label(first, chosen)}",
                    path=files[first][0].file_path,
                    size=sum(part.size_on_disk for part in parts),
                    last_used=max(part.blob_last_accessed for part in parts),
                )
            )
    return sorted(models, key=lambda model: model.name.lower())


def models_in(folder: Path, pattern: str = "**/*") -> list[LocalModel]:
    """The GGUF models in a folder and those below it, as far as the pattern goes. Raises HobbitError."""
    paths, problems = models_below(folder, pattern)
    for problem in problems:
        print(f"pyhobbit: skipped   {problem}", file=sys.stderr)
    models = []
    for path in paths:
        beside = {each.name: each for each in path.parent.iterdir()}
        size = sum(beside[name].stat().st_size for name in whole(str(folder), path.name, beside))
        models.append(LocalModel(str(path), path, size, path.stat().st_atime, "a folder"))
    return models


def models_of_programs() -> list[LocalModel]:
    """The MoE models of ollama and LM Studio."""
    found = [
        replace(model, name=str(model.path.relative_to(folder)), program="LM Studio")
        for folder in other_programs.lm_studio_folders()
        if folder.is_dir()
        for model in models_in(folder)
    ]
    for name, path in other_programs.ollama_models():
        found.append(LocalModel(name, path, path.stat().st_size, path.stat().st_atime, "ollama"))
    forms = {model.path: other_programs.moe_form(model.path) for model in found}
    moe = (model for model in found if forms[model.path] is not None)
    return [replace(model, program=f"{model.program}{forms[model.path]}") for model in moe]


def remove(name: str, cache: Path | None = None) -> tuple[list[str], int]:
    """Deletes USER/NAME[:QUANT] from the cache; gives files and bytes. Raises ConfigError, HobbitError."""
    user_and_name, quant = parse_repository(name)
    repo = next((each for each in _repositories(cache) if each.repo_id == user_and_name), None)
    files = {} if repo is None else _files(repo)
    chosen = _models(files)
    if quant in files and is_first(quant) and is_complete(quant, files):  # also a draft's or a projector
        chosen = [quant]
    elif quant is not None:
        chosen = [the_one(user_and_name, chosen, quant)] if matching(chosen, quant) else []
    if repo is None or not chosen:
        raise HobbitError(f"{name} has not been downloaded; pyhobbit list shows what has been")
    doomed = {part: files[part] for first in chosen for part in whole(repo.repo_id, first, files)}
    versions = [version for part in doomed.values() for version in part]
    blobs = {version.blob_path: version.size_on_disk for version in versions}
    if any(file.lower().endswith(_WEIGHTS) and file not in doomed for file in files):
        for path in (*(version.file_path for version in versions), *blobs):
            path.unlink(missing_ok=True)
    else:
        commits = (revision.commit_hash for revision in repo.revisions)
        scan_cache_dir(cache).delete_revisions(*commits).execute()
    return list(doomed), sum(blobs.values())


def _repositories(cache: Path | None) -> list[CachedRepoInfo]:
    try:
        return [repo for repo in scan_cache_dir(cache).repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _files(repo: CachedRepoInfo) -> dict[str, list[CachedFileInfo]]:
    """Its files in all versions, the newest one first, by path in the repository."""
    files: dict[str, list[CachedFileInfo]] = {}
    for revision in sorted(repo.revisions, key=lambda each: -each.last_modified):
        for file in revision.files:
            files.setdefault(str(file.file_path.relative_to(revision.snapshot_path)), []).append(file)
    return files


def _models(files: Mapping[str, Sequence[CachedFileInfo]]) -> list[str]:
    """The first files of the models that are complete, by name in the repository."""
    complete = (name for name in sorted(files) if is_first(name) and is_complete(name, files))
    return [name for name in complete if is_model_file(files[name][0].file_path)]
