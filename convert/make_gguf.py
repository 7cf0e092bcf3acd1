# SPDX-License-Identifier: MIT
"""The command `pyhobbit convert`; imports what takes long only when it runs."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

try:
    from pyhobbit.convert.options import Options
    from pyhobbit.errors import ConfigError
    from pyhobbit.model.file_names import model_stem
    from pyhobbit.model.model_path import add_model_arguments, check_model_arguments, model_path
    from pyhobbit.native.threads import processor_cores
    from pyhobbit.settings.table import Key
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    home = Path(__file__).resolve().parents[1]
    sys.exit(f"{error}: run 'make build' in {home}, then '. {home}/.venv/bin/activate', and this again")


_KEYS = {
    "t1": Key(
        "number",
        "threshold to store: high precision until the gate weights sum to it; 1: none (default: 0.6)",
    ),
    "t2": Key(
        "number",
        "threshold to store: low precision until they sum to it, the rest is skipped (default: 1, none is)",
    ),
    "drop_high": Key(
        "text",
        "of MODEL, a file with two tiers, leave out this share of the high versions, such as 0.5: those that "
        f"calibrate --set rule=edgemoe found least sensitive; {Options.within_limit}: as many as it found "
        "within your limit (default output: MODEL-partial.gguf)",
        "SHARE",
    ),
    "once": Key("flag", "with drop_high: leave out the low versions of the high experts, too", default=False),
}


def add_arguments(parser: Any) -> None:
    """Declares the options of the verb. parser: of pyhobbit.cli.help."""
    parser.epilog = (
        "All tensors but the routed experts keep MODEL's type. A checkpoint is read as\n"
        "f16, as f32 or bf16 if --high is that, in its own 16-bit type otherwise."
    )
    add = parser.add_argument
    add_model_arguments(parser, "a GGUF, single or split, or a folder with a Hugging Face checkpoint")
    what = "output file (default: MODEL-hobbit.gguf beside MODEL; with -hf in this folder)"
    add("-o", dest="output", type=Path, metavar="OUT", help=what)
    what = "type of the low tier (default: about half the bits of the high tier)"
    add("--low", metavar="TYPE", help=what)
    what = "type of the high tier, or keep for the model's own (default: keep; f16 for a checkpoint)"
    add("--high", metavar="TYPE", help=what)
    add("--imatrix", type=Path, metavar="FILE", help="importance matrix, by which the low tier is rounded")
    add("--sidecar", action="store_true", help="write only the further tier, to MODEL.hobbit.gguf")
    add("--split", action="store_true", help="write a checkpoint as a plain MODEL.gguf and its sidecar")
    add("--dry-run", action="store_true", help="print the plan with sizes and write nothing")
    what = "replace an existing output, and allow a low tier that is hardly smaller than the high one"
    add("--force", action="store_true", help=what)
    add("--threads", type=int, metavar="N", default=processor_cores(), help="default: all cores, %(default)s")
    parser.add_keys(_KEYS)


def run(args: argparse.Namespace) -> int:
    """Runs the verb with parsed options; returns the exit status. Raises HobbitError."""
    from pyhobbit.convert.pipeline import convert

    args.drop_high = args.drop_high and _share(args.drop_high)
    with _cleaning_up():
        check_model_arguments(args)
        if args.hf_repo is not None:
            _check_types(args)  # before a long download
        args.model = model_path(args, checkpoint=not args.sidecar)
        if args.hf_repo is not None and args.output is None and not args.sidecar:
            # a downloaded model lies in a cache, where nobody would look for the output
            repo = args.hf_repo.partition(":")[0].rpartition("/")[2]
            stem = repo if args.model.is_dir() else model_stem(args.model)
            args.output = Path.cwd() / f"{stem}{'' if args.split else '-hobbit'}.gguf"
        convert(Options(**{field.name: getattr(args, field.name) for field in fields(Options)}))
    return 0


def _share(text: str) -> float | str:
    try:
        return text if text == Options.within_limit else float(text)
    except ValueError as e:
        raise ConfigError(f"'{text}' is neither a share, such as 0.5, nor {Options.within_limit}") from e


def _check_types(args: argparse.Namespace) -> None:
    from pyhobbit.convert.pipeline import high_tier
    from pyhobbit.model.quantize import type_by_name

    high_tier(args.high)
    if args.low is not None:
        type_by_name(args.low)


@contextmanager
def _cleaning_up() -> Iterator[None]:
    """Within it, a termination or a lost terminal ends the program like Ctrl-C does, no file left behind."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:  # nohup
            signal.signal(number, lambda *_: sys.exit("terminated: nothing was written"))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


if __name__ == "__main__":  # a checkout's script: the verb `pyhobbit convert`
    import runpy

    sys.argv[1:1] = ["convert"]
    runpy.run_module("pyhobbit", run_name="__main__", alter_sys=True)
