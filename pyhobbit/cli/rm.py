# SPDX-License-Identifier: MIT
"""Deletes downloaded models: all of USER/NAME, or the one of USER/NAME:QUANT."""

import argparse

from pyhobbit.errors import ConfigError
from pyhobbit.model.model_path import add_model_arguments, check_model_arguments
from pyhobbit.settings.config import format_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, "")


def run(args: argparse.Namespace) -> int:
    from pyhobbit.model.downloaded import remove  # huggingface_hub takes a while

    named = args.model
    check_model_arguments(args)
    if args.model is not None:
        hint = "pyhobbit list shows their names"
        if named != str(args.model):  # another program's name
            hint = f"ollama rm {named}, or LM Studio, deletes it"
        raise ConfigError(f"{named} is no download, and rm deletes downloads only; {hint}")
    files, size = remove(args.hf_repo)
    print(f"deleted {', '.join(files)} ({format_size(size)})")
    return 0
