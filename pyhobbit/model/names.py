# SPDX-License-Identifier: MIT
"""How a user names a model: a GGUF file, or a repository on Hugging Face."""

from difflib import get_close_matches
from pathlib import Path

from pyhobbit.errors import ConfigError, HobbitError

COMPANIONS = (".hobbit.gguf", ".calibration.gguf")
"""Endings of the files beside a model: its sidecar and its calibration."""

_MAX_NAMES = 5


def parse_repository(name: str) -> tuple[str, str | None]:
    """USER/NAME and QUANT, None without one, of USER/NAME[:QUANT]. Raises ConfigError."""
    repo, _, quant = name.partition(":")
    pieces = repo.split("/")
    if len(pieces) != 2 or not all(pieces) or ":" in quant:
        raise ConfigError(f"'{name}' is not a repository; write USER/NAME or USER/NAME:QUANT")
    return repo, quant or None


def check_model_file(path: Path) -> None:
    """Raises HobbitError for what a user can get wrong about the name of a GGUF file."""
    if path.is_dir():
        raise HobbitError(f"{path} is a folder; give a GGUF file{_suggestion(path)}")
    if path.exists() and not path.is_file():
        raise HobbitError(f"{path} is not a regular file; give a GGUF file")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise HobbitError(f"{path} does not exist{_suggestion(path.parent, path.name)}") from None
    except OSError as e:
        raise HobbitError(f"{path} cannot be read: {e.strerror}") from e
    if magic != b"GGUF":
        raise HobbitError(
            f"{path} is not a GGUF file; make one from a checkpoint with: pyhobbit convert FOLDER"
        )


def _suggestion(folder: Path, name: str = "") -> str:
    """What to take instead of `name`, in words that follow a sentence."""
    if not folder.is_dir():
        repository = f"{folder.name}/{name}"
        is_repository = len(folder.parts) == 1 and name and not name.endswith(".gguf")
        hint = f"; if it is on Hugging Face: --hf-repo {repository}" if is_repository else ""
        return f", nor does the folder {folder}{hint}"
    try:
        names = sorted(entry.name for entry in folder.iterdir() if _is_model(entry))
    except OSError:
        return ""
    near = get_close_matches(name, names, n=3, cutoff=0.75)
    if near:
        return "; did you mean " + " or ".join(str(folder / each) for each in near) + "?"
    if names:
        more = " and others" if len(names) > _MAX_NAMES else ""
        return f"; {folder} holds {', '.join(names[:_MAX_NAMES])}{more}"
    has_checkpoint = (folder / "config.json").exists()
    return f"; convert this checkpoint first with: pyhobbit convert {folder}" if has_checkpoint else ""


def _is_model(path: Path) -> bool:
    return path.suffix == ".gguf" and not path.name.endswith(COMPANIONS)
