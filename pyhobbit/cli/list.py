# SPDX-License-Identifier: MIT
"""Lists the models that have been downloaded, and those of ollama and LM Studio."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pyhobbit.errors import ConfigError
from pyhobbit.model.model_path import check_model_arguments
from pyhobbit.settings.config import format_size

if TYPE_CHECKING:
    from pyhobbit.model.downloaded import LocalModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    # huggingface_hub takes a while
    from pyhobbit.model.downloaded import downloaded_models, models_of_programs

    models = [*downloaded_models(), *models_of_programs()]
    if args.json:
        print(json.dumps([{**asdict(model), "path": str(model.path)} for model in models], indent=2))
        return 0
    if not models:
        print("no model has been downloaded; get one with: pyhobbit pull USER/NAME")
        return 0
    print("\n".join(_table(models)))
    return 0


def _table(models: "Sequence[LocalModel]") -> list[str]:
    rows = [("MODEL", "SIZE", "LAST USED", "FROM")]
    for model in models:
        day = time.strftime("%Y-%m-%d", time.localtime(model.last_used))
        rows.append((model.name, format_size(model.size), day, model.program))
    width, size = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{row[0]:{width}}  {row[1]:>{size}}  {row[2]:10}  {row[3]}" for row in rows]


def require_model(args: argparse.Namespace) -> None:
    """Checks the arguments of a model. Without a MODEL a terminal is asked which of those here is meant."""
    is_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
    if args.model is None and args.hf_repo is None and is_terminal:
        args.model = _asked()
    check_model_arguments(args)


def _asked() -> str | None:
    """The name of a model by its number; None where no model is here. Raises ConfigError."""
    from pyhobbit.model.downloaded import downloaded_models, models_in, models_of_programs

    models = [*models_in(Path(), "*"), *downloaded_models(), *models_of_programs()]
    if not models:
        return None
    head, *lines = _table(models)
    numbered = [f"     {head}", *(f"{n:3}  {line}" for n, line in enumerate(lines, 1)), "Which number? "]
    print("\n".join(numbered), end="", file=sys.stderr, flush=True)
    typed = sys.stdin.readline().strip()
    if not typed.isdecimal() or not 0 < int(typed) <= len(models):
        raise ConfigError(f"'{typed}' is none of the numbers; give one, or a MODEL behind the command")
    return models[int(typed) - 1].name
