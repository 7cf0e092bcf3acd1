# SPDX-License-Identifier: MIT
"""Downloads a model from Hugging Face into the cache that all programs share, and prints its path."""

import argparse
from pathlib import Path

from pyhobbit.errors import ConfigError
from pyhobbit.model.model_path import add_model_arguments, check_model_arguments, model_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, "")
    what = "make FILE, such as qwen3.gguf, a link to it, which all commands take"
    parser.add_argument("--as", dest="link", type=Path, metavar="FILE", help=what)


def run(args: argparse.Namespace) -> int:
    check_model_arguments(args)
    if args.model is not None:
        raise ConfigError(f"{args.model} is not on Hugging Face; write USER/NAME[:QUANT] or an address there")
    if args.link is not None and args.link.exists():
        raise ConfigError(f"--as {args.link}: there is such a file already; name another one")
    if args.link is not None and not args.link.parent.is_dir():
        raise ConfigError(f"--as {args.link}: there is no folder {args.link.parent}; make it first")
    path = model_path(args)
    if args.link is not None:
        args.link.unlink(missing_ok=True)  # one to a model that was deleted
        args.link.symlink_to(path.absolute())
    print(args.link or path)
    return 0
