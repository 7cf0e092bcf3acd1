# SPDX-License-Identifier: MIT
"""The GGUF models in Hugging Face's cache, which all programs on huggingface_hub share, and in folders."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CachedFileInfo, CachedRepoInfo, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from pyhobbit.errors import HobbitError
from pyhobbit.model.download import is_model, quant_of, whole
from pyhobbit.model.file_names import uses_path
from pyhobbit.model.names import parse_repository

_WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class LocalModel:
    """name: what a command takes as MODEL.  path: of its first file.  size: of all its files, in bytes.

    last_used: seconds since 1970.
    """

    name: str
    path: Path
    size: int
    last_used: float


def downloaded_models(cache: Path | None = None) -> list[LocalModel]:
    """By name. cache: default as huggingface_hub's, which HF_HOME changes."""
    models = []
    for repo in _repositories(cache):
        files = _files(repo)
        for first in _models(files):
            parts = [files[name][0] for name in whole(repo.repo_id, first, files)]
            models.append(
                LocalModel(
                    name=f"{repo.repo_id}:{_label(first, files)}",
                    path=files[first][0].file_path,
                    size=sum(part.size_on_disk for part in parts),
                    last_used=max(part.blob_last_accessed for part in parts),
                )
            )
    return sorted(models, key=lambda model: model.name.lower())


def models_in(folder: Path) -> list[LocalModel]:
    """The GGUF models in a folder and those below it. Raises HobbitError."""
    if not folder.is_dir():
        raise HobbitError(f"{folder} is not a folder; give one that holds GGUF files")
    sizes = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*.gguf") if path.is_file()}
    return [
        LocalModel(
            name=str(folder / first),
            path=folder / first,
            size=sum(sizes[name].st_size for name in whole(str(folder), first, sizes)),
            last_used=sizes[first].st_atime,
        )
        for first in _models(sizes)
    ]


def remove(name: str, cache: Path | None = None) -> tuple[list[str], int]:
    """Deletes downloaded GGUF models from the cache: all of USER/NAME, or the one of USER/NAME:QUANT.

    Returns the names of the files and how many bytes are free again. Raises ConfigError, HobbitError.
    """
    user_and_name, quant = parse_repository(name)
    repo = next((each for each in _repositories(cache) if each.repo_id == user_and_name), None)
    files = {} if repo is None else _files(repo)
    chosen = list(_models(files))
    if quant is not None:
        names = {first: (first, _label(first, files), quant_of(first) or first) for first in chosen}
        chosen = [first for first in chosen if quant.lower() in map(str.lower, names[first])]
    if repo is None or not chosen:
        raise HobbitError(f"{name} has not been downloaded; pyhobbit list shows what has been")
    doomed = {part: files[part] for first in chosen for part in whole(repo.repo_id, first, files)}
    versions = [version for part in doomed.values() for version in part]
    blobs = {version.blob_path: version.size_on_disk for version in versions}
    for version in (version for first in chosen for version in files[first]):
        uses_path(version.file_path).unlink(missing_ok=True)
    if any(file.endswith(_WEIGHTS) and file not in doomed for file in files):
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


def _models(files: Collection[str]) -> Iterator[str]:
    """The first files of the models that are complete."""
    for file in sorted(files):
        if is_model(file):
            try:
                whole("", file, files)
            except HobbitError:  # a download that broke off
                continue
            yield file


def _label(first: str, files: Collection[str]) -> str:
    """The QUANT of a model, or its path where another model of the repository has the same."""
    quant = quant_of(first)
    is_unique = quant is not None and [quant_of(each) for each in _models(files)].count(quant) == 1
    return quant if quant is not None and is_unique else first
