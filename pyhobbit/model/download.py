# SPDX-License-Identifier: MIT
"""Gets models from Hugging Face, into the cache that all programs on huggingface_hub share."""

import contextlib
import errno
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any

from huggingface_hub import (
    HfApi,
    constants,
    errors,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, tqdm

from pyhobbit.errors import ConfigError, HobbitError, LoadError
from pyhobbit.model import file_names
from pyhobbit.model.file_names import is_first, is_model, matching, the_one
from pyhobbit.model.gguf_file import GgufFile, parse_head
from pyhobbit.model.long_work import check_room
from pyhobbit.model.names import check_kind, check_quantised, parse_repository
from pyhobbit.settings.config import format_size

# The first of these that a repository has is taken where no QUANT is named, as in llama.cpp.
_DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
_HEAD_STEP, _MAX_HEAD = 1 << 20, 1 << 26  # bytes; the header holds the vocabulary
_CHECKPOINT = re.compile(r"[^/]+\.(json|model|txt|jinja|tiktoken)")
# The kinds of weights, the best first; a repository may hold its weights in several.
_WEIGHTS = (r"model[^/]*\.safetensors", r"[^/]+\.safetensors", r"pytorch_model[^/]*\.bin")


class UnreachableError(HobbitError):
    """There is no network, or nothing answers there."""


@dataclass(frozen=True)
class Repo:
    """A repository, and the cache of downloads; None: huggingface_hub's own."""

    name: str
    cache: Path | None = None

    def cached(self, file: str) -> bool:
        """Tells if the cache has the newest version that it knows of."""
        with _explained(self):
            return isinstance(try_to_load_from_cache(self.name, file, cache_dir=self.cache), str)

    def sizes(self) -> dict[str, int]:
        """Bytes by file. Raises HobbitError, UnreachableError."""
        with _explained(self):
            try:
                info = HfApi().model_info(self.name, files_metadata=True)
            except errors.HfHubHTTPError:
                raise
            except (errors.HTTPError, ConnectionError) as e:
                why = f"{constants.ENDPOINT} cannot be reached; check the network ({_first_line(e)})"
                raise UnreachableError(why) from e
            return {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}

    def head(self, file: str, size: int) -> GgufFile:
        """The header of a GGUF of `size` bytes, by one request. Raises HobbitError."""
        url = hf_hub_url(self.name, file)
        headers = {**build_hf_headers(), "Range": f"bytes=0-{_MAX_HEAD - 1}"}
        data, found = b"", None
        with (
            _explained(self),
            get_session().stream("GET", url, headers=headers, follow_redirects=True) as response,
        ):
            hf_raise_for_status(response)
            chunks = response.iter_bytes(_HEAD_STEP)
            while found is None and len(data) < _MAX_HEAD and (more := next(chunks, b"")):
                data += b"".join([more, *islice(chunks, len(data) // _HEAD_STEP)])  # twice as much
                found = parse_head(Path(file), data, size)
        if found is None:
            raise LoadError(f"{file} of {self.name} has no readable header; choose another QUANT")
        check_kind(Path(file), data)
        return found

    def check(self, first: str, sizes: Mapping[str, int]) -> list[GgufFile]:
        """The headers of a model's parts. Raises LoadError, HobbitError. sizes: bytes by file."""
        from pyhobbit.model.loading import check_known  # loads the libraries

        files = [self.head(part, sizes[part]) for part in own_parts(self.name, first, sizes)]
        check_known(files)
        return files


def fetch(name: str, checkpoint: bool = False, *, cache: Path | None = None) -> Path:
    """Downloads a model unless the cache has it, file by file. Progress is on standard error.

    name: USER/NAME[:QUANT]; QUANT is the GGUF's label, a whole word of its name, or its path. All parts of a
    split model come, and the sidecar and calibration that lie beside it.
    checkpoint: without a QUANT, take the safetensors, configuration and tokenizer where there are any.
    cache: default as huggingface_hub's, which HF_HOME changes; HF_ENDPOINT changes where files come from.
    Returns the GGUF, of a split one its first file, or the checkpoint's folder. Without a network what is in
    the cache already is taken. Raises ConfigError, HobbitError, KeyboardInterrupt.
    """
    user_and_name, quant = parse_repository(name)
    repo = Repo(user_and_name, cache)
    path = _fetch(repo, lambda files: _choose(repo, files, quant, checkpoint))
    return path if file_names.is_gguf(path) else path.parent


def _fetch(repo: Repo, choose: Callable[[Collection[str]], list[str]]) -> Path:
    """Downloads the files that are chosen; returns the first."""
    try:
        sizes = repo.sizes()
    except UnreachableError as e:
        return _from_cache(repo, choose, e)
    files = choose(sizes)
    missing = {file: sizes[file] for file in files if not repo.cached(file)}
    if is_model(files[0]) and files[0] in missing:
        repo.check(files[0], sizes)
    if "config.json" in files and not file_names.is_gguf(files[0]):
        check_quantised(repo.name, _download(repo, "config.json", sizes["config.json"]))
    hint = "make room, or set HF_HOME to a folder on another disk"
    check_room(repo.cache or Path(constants.HF_HUB_CACHE), sum(missing.values()), hint)
    first, *_ = [_download(repo, file, sizes[file]) for file in files]
    return first


def _download(repo: Repo, file: str, size: int) -> Path:
    if not repo.cached(file):  # the library's progress bar shows on terminals only
        print(f"pyhobbit: downloading {file} of {repo.name}, {format_size(size)}", file=sys.stderr)
    with _explained(repo):
        return Path(hf_hub_download(repo.name, file, cache_dir=repo.cache, tqdm_class=_bounded(file, size)))


def _bounded(file: str, size: int) -> type[tqdm]:
    """The library's progress bar, which ends a download that brings more bytes than were announced.

    A body in chunks has no length of its own, and would be written until the disk is full.
    """

    class Bounded(tqdm):
        _lock = RLock()  # tqdm's own is two locks, and a signal may raise between them

        def __init__(self, *arguments: Any, **named: Any) -> None:
            self._received = named.get("initial", 0)
            super().__init__(*arguments, **named)

        def update(self, n: float | None = 1) -> bool | None:
            self._received += n or 0
            if size and self._received > size:
                raise HobbitError(
                    f"the download of {file} does not end at its {format_size(size)}; "
                    "check the network, which may change what it brings"
                )
            return super().update(n)

    return Bounded


# --- the files to download


def _choose(repo: Repo, files: Collection[str], quant: str | None, checkpoint: bool) -> list[str]:
    """The files that make the model, the first one first."""
    kinds = ([file for file in sorted(files) if re.fullmatch(kind, file)] for kind in _WEIGHTS)
    weights = next(filter(None, kinds), [])
    if checkpoint and quant is None and weights:
        if all(each.startswith("consolidated") for each in weights):
            raise HobbitError(file_names.MISTRALS_OWN.format(repo.name))
        return [*weights, *(file for file in sorted(files) if _CHECKPOINT.fullmatch(file))]
    if quant is not None and quant in files and is_first(quant):  # the file itself, of any kind
        return whole(repo.name, quant, files)
    if quant is not None:
        for joined, pieces in file_names.raw_pieces(files).items():
            if matching([joined], quant):
                raise HobbitError(f"{repo.name}: {file_names.in_pieces(joined, pieces)}")
        return whole(repo.name, the_one(repo.name, models_of(repo, files), quant), files)
    models = models_of(repo, files)
    wanted = (each for quant in _DEFAULT_QUANTS for each in matching(models, quant))
    return whole(repo.name, next(wanted, models[0]), files)


def models_of(repo: Repo, files: Collection[str]) -> list[str]:
    """The first files of its models. Raises HobbitError where there is none."""
    if models := [file for file in sorted(files) if is_model(file)]:
        return models
    if any(re.fullmatch(kind, file) for kind in _WEIGHTS for file in files):
        hint = "convert its checkpoint first with: pyhobbit convert -hf"
        raise HobbitError(f"{repo.name} has no GGUF file; {hint} {repo.name}")
    for joined, pieces in file_names.raw_pieces(files).items():
        raise HobbitError(f"{repo.name}: {file_names.in_pieces(joined, pieces)}")
    raise HobbitError(f"{repo.name} holds no model: neither a GGUF file nor safetensors")


def own_parts(repo: str, first: str, files: Collection[str]) -> list[str]:
    """A GGUF of a repository with its other parts. Raises HobbitError as whole() does."""
    return [part for part in whole(repo, first, files) if not part.lower().endswith(file_names.COMPANIONS)]


def whole(repo: str, first: str, files: Collection[str]) -> list[str]:
    """A GGUF with its other parts, sidecar and calibration. first: its first part. Raises HobbitError."""
    name = first.rpartition("/")[2]
    folder = first.removesuffix(name)
    parts = [folder + part for part in file_names.part_names(name)]
    missing = [part for part in parts if part not in files]
    if missing:
        raise HobbitError(f"{repo} lacks {missing[0]}, a part of {first}; choose another QUANT")
    stem = folder + file_names.model_stem(Path(first))
    return [*parts, *(stem + ending for ending in file_names.COMPANIONS if stem + ending in files)]


def is_complete(first: str, files: Collection[str]) -> bool:
    """Tells if no part of a model is missing."""
    try:
        return bool(whole("", first, files))
    except HobbitError:
        return False


# --- the cache


def _from_cache(repo: Repo, choose: Callable[[Collection[str]], list[str]], error: UnreachableError) -> Path:
    """Finds the files of an earlier download. Raises HobbitError."""
    with contextlib.suppress(errors.LocalEntryNotFoundError, HobbitError):
        snapshot = Path(snapshot_download(repo.name, cache_dir=repo.cache, local_files_only=True))
        files = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
        return snapshot / choose(files)[0]
    raise HobbitError(f"{repo.name} has not been downloaded before, and {error}") from error


# --- errors


@contextlib.contextmanager
def _explained(repo: Repo) -> Iterator[None]:
    """Turns what huggingface_hub's functions raise into one sentence each; for calls of them alone."""
    page = f"{constants.ENDPOINT}/{repo.name}"
    try:
        yield
    except errors.HFValidationError as e:
        raise ConfigError(f"'{repo.name}' is not a repository's name: {_first_line(e)}") from e
    except errors.GatedRepoError as e:
        raise HobbitError(
            f"{repo.name} is gated: accept its conditions on {page}, then log in with: hf auth login"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise HobbitError(
            f"there is no {page}, or it is private; check the name, or log in with: hf auth login"
        ) from e
    except errors.HfHubHTTPError as e:
        raise HobbitError(f"{page} cannot be downloaded: {_first_line(e)}; try again later") from e
    except (errors.HTTPError, ConnectionError, errors.LocalEntryNotFoundError) as e:
        raise HobbitError(
            f"the download of {repo.name} was interrupted: {_first_line(e)}; run the command again"
        ) from e
    except OSError as e:
        is_full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        place = f"{e.filename2 or e.filename or constants.HF_HUB_CACHE}: {e.strerror or _first_line(e)}"
        reason = "the disk is full; make room, and run the command again" if is_full else place
        raise HobbitError(f"{repo.name} cannot be stored: {reason}") from e
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:  # no answer of the hub
        what = "does not answer as Hugging Face does; check the network, which may ask for a login"
        raise HobbitError(f"{constants.ENDPOINT} {what}") from e


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
