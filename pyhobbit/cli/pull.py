# SPDX-License-Identifier: MIT
"""Downloads a model from Hugging Face into the cache that all programs share, and prints its path."""

import argparse

from pyhobbit.errors import ConfigError
from pyhobbit.model.model_path import add_model_arguments, check_model_arguments, model_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, "")


def run(args: argparse.Namespace) -> int:
    check_model_arguments(args)
    if args.model is not None:
        raise ConfigError(f"{args.model} is not on Hugging Face; write USER/NAME[:QUANT] or an address there")
    print(model_path(args).absolute())
    return 0
