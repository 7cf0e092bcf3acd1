# SPDX-License-Identifier: MIT
"""The model that a command is about: a path, or a repository to get it from."""

import argparse
from pathlib import Path

from pyhobbit.errors import ConfigError
from pyhobbit.model import other_programs
from pyhobbit.model.names import parse_repository, repository_in, suggestion


def add_model_arguments(
    parser: argparse.ArgumentParser, what: str = "GGUF file; of a split model its first file"
) -> None:
    """Declares MODEL and -hf, one of which is needed; model_path() takes the parsed arguments."""
    where = "USER/NAME[:QUANT] or an address on Hugging Face"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{what}; or {where}" if what else where)
    parser.add_argument("-hf", dest="hf_repo", metavar="REPO", help=f"instead of MODEL: {where}")


def model_path(args: argparse.Namespace, checkpoint: bool = False) -> Path:
    """The model's file, downloaded where -hf names it. Raises HobbitError, KeyboardInterrupt."""
    check_model_arguments(args)
    if args.hf_repo is None:
        return args.model
    from pyhobbit.model.download import fetch  # huggingface_hub takes half a second to import
    from pyhobbit.model.recommend import recommended

    name, quant = parse_repository(args.hf_repo)
    return fetch(args.hf_repo if quant or checkpoint else recommended(name), checkpoint)


def check_model_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError unless exactly one of MODEL and -hf is given, and is no nonsense.

    Makes MODEL a path, or moves it to -hf, which becomes USER/NAME[:QUANT].
    """
    if args.model is None and args.hf_repo is None:
        raise ConfigError(
            "give a MODEL: a GGUF file, or USER/NAME[:QUANT] on Hugging Face, such as "
            f"Qwen/Qwen3-30B-A3B-GGUF; pyhobbit list shows those that are here{suggestion(Path.cwd())}"
        )
    if args.model is not None and args.hf_repo is not None:
        raise ConfigError(f"both MODEL ({args.model}) and -hf ({args.hf_repo}) are given; give one")
    if args.hf_repo is not None:
        args.hf_repo = repository_in(args.hf_repo) or args.hf_repo
    elif isinstance(args.model, str):
        found = None if Path(args.model).exists() else other_programs.find(args.model)
        args.hf_repo = None if found else repository_in(args.model)
        args.model = None if args.hf_repo is not None else found or Path(args.model)
    if args.hf_repo is not None:
        parse_repository(args.hf_repo)
