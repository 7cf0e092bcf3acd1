# SPDX-License-Identifier: MIT
"""The model that a command is about: a path, or a repository to get it from."""

import argparse
from pathlib import Path

from pyhobbit.errors import ConfigError
from pyhobbit.model.names import parse_repository


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
    from pyhobbit.model.download import fetch  # huggingface_hub takes half a second to import

    return fetch(args.hf_repo, checkpoint)


def check_model_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError unless exactly one of MODEL and --hf-repo is given, and is no nonsense."""
    if args.model is None and args.hf_repo is None:
        raise ConfigError("give a MODEL, such as a GGUF file, or --hf-repo USER/NAME[:QUANT]")
    if args.model is not None and args.hf_repo is not None:
        raise ConfigError(f"both MODEL ({args.model}) and --hf-repo ({args.hf_repo}) are given; give one")
    if args.hf_repo is not None:
        parse_repository(args.hf_repo)
