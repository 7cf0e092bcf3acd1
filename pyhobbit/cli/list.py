# SPDX-License-Identifier: MIT
"""Lists the models that have been downloaded, those of ollama and LM Studio, and those in folders."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from pyhobbit.settings.config import format_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "also list the GGUF files in it"
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help=what)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    # huggingface_hub takes a while
    from pyhobbit.model.downloaded import downloaded_models, models_in, models_of_programs

    models = [*downloaded_models(), *models_of_programs()]
    models += [model for folder in args.folders for model in models_in(folder)]
    if args.json:
        print(json.dumps([{**asdict(model), "path": str(model.path)} for model in models], indent=2))
        return 0
    if not models:
        print("no model has been downloaded; get one with: pyhobbit pull USER/NAME")
        return 0
    rows = [("MODEL", "SIZE", "LAST USED", "FROM")]
    for model in models:
        day = time.strftime("%Y-%m-%d", time.localtime(model.last_used))
        rows.append((model.name, format_size(model.size), day, model.program))
    width, size = (max(len(row[column]) for row in rows) for column in (0, 1))
    for row in rows:
        print(f"{row[0]:{width}}  {row[1]:>{size}}  {row[2]:10}  {row[3]}")
    return 0
