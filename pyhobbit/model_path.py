# SPDX-License-Identifier: MIT
"""The model that a command is about: a path, or a repository to get it from."""

import argparse
from difflib import get_close_matches
from pathlib import Path

from pyhobbit.errors import ConfigError, HobbitError

_MAX_NAMES = 5
# Files beside a model that are none.
COMPANIONS = (".hobbit.gguf", ".calibration.gguf")


def add_model_arguments(
    parser: argparse.ArgumentParser, what: str = "GGUF file; of a split model its first file"
) -> None:
    """Declares MODEL and --hf-repo, one of which is needed; model_path() takes the parsed arguments."""
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help=what)
    parser.add_argument(
        "-hf",
        "--hf-repo",
        metavar="REPO",
        help="instead of MODEL: USER/NAME[:QUANT] on Hugging Face (default: Q4_K_M)",
    )


def model_path(args: argparse.Namespace, checkpoint: bool = False) -> Path:
    """The model's file, downloaded first where --hf-repo names it; checkpoint: a folder will do.

    Raises HobbitError, KeyboardInterrupt.
    """
    check_model_arguments(args)
    if args.hf_repo is None:
        return args.model
    from pyhobbit.download import fetch  # takes half a second

    return fetch(args.hf_repo, checkpoint)


def check_model_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError unless exactly one of MODEL and --hf-repo is given, and is no nonsense."""
    if args.model is None and args.hf_repo is None:
        raise ConfigError("give a MODEL, such as a GGUF file, or --hf-repo USER/NAME[:QUANT]")
    if args.model is not None and args.hf_repo is not None:
        raise ConfigError(f"both MODEL ({args.model}) and --hf-repo ({args.hf_repo}) are given; give one")
    if args.hf_repo is not None:
        parse_repository(args.hf_repo)


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
