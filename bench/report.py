# SPDX-License-Identifier: MIT
"""The tables and figures of five papers on your own model: one HTML page, and its raw lines as JSON.

    python bench/report.py MODEL.gguf --text my.txt --memory 8G --hours 2

Parts run in turn, the cheapest first. A part whose line is there is not run again, so the same command goes
on where it was stopped, and more --hours run more. bench/README.md has the format of the lines.
"""

import json
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.analysis import quality, routing, speed
from bench.analysis.part import Part, Run
from bench.harness import system
from bench.results import page, read_lines
from pyhobbit.cli.main import ended, with_options
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.model_file import model_parts, opened_info, read_model_file
from pyhobbit.model.names import check_model_file
from pyhobbit.native.files import read_text, write_text
from pyhobbit.quality.evaluate import perplexity
from pyhobbit.settings.config import format_size, parse_size

_CHEAPEST_FIRST: tuple[Part, ...] = (
    *(routing.routing, routing.answers, routing.skipping, speed.words, speed.systems, speed.confidence),
    *(speed.prefetch, quality.rules, quality.types, quality.widths),
)
PARTS: Mapping[str, Part] = {each.__name__: each for each in _CHEAPEST_FIRST}
_GUESS = "The perplexity is that of a guess: figures of quality say nothing about this model."


def head_of(run: Run) -> dict[str, Any]:
    """The subject of all lines: a report goes on only where it is the same."""
    machine, n_used = system.machine(), run.file.n_used
    return {
        "model": run.model.name,
        "bytes": sum(part.size for part in model_parts(run.model)),
        "architecture": run.file.architecture,
        "experts": f"{max(n_used.values())} of {run.file.n_experts} in {len(n_used)} layers",
        "tiers": ", ".join(f"{tier.name}: {'/'.join(tier.types)}" for tier in run.file.tiers),
        "calibration": run.file.calibration is not None,
        "text": sha256(run.text.encode()).hexdigest()[:12],
        "parts of the text": f"{run.n_chunks} of {run.n_ctx} tokens",
        "memory": "25 % of the experts" if run.memory is None else format_size(run.memory),
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "threads": run.n_threads or "one per core",
        "kernel": platform.release(),
        "pyhobbit": version("pyhobbit"),
    }


def start(run: Run) -> dict[str, Any]:
    """The first part's line: whether the model says anything about the text."""
    with run.evaluator() as evaluator:
        (chunk, *_) = run.chunks(evaluator)
        reference = evaluator.reference([chunk])
    is_guess = perplexity(reference, [chunk]) > 0.1 * reference.shape[2]
    return {"part": "start", "notes": [_GUESS] if is_guess else []}


def run_part(run: Run, name: str, end: float) -> dict[str, Any]:
    """The part's line; not_run: why it made no figures. end: of the time that is given for parts to begin."""
    begun = time.monotonic()
    if begun >= end:
        return {"part": name, "not_run": "the time was over; give more --hours"}
    _say(name)
    try:
        return {"part": name, "figures": PARTS[name](run), "seconds": round(time.monotonic() - begun, 1)}
    except HobbitError as error:
        return {"part": name, "not_run": with_options(str(error))}


def _say(what: str) -> None:
    print(f"report: {what}", file=sys.stderr, flush=True)


def report(run: Run, hours: float, parts: list[str]) -> Path:
    """Runs what the time allows; returns the page. Raises HobbitError, also for lines of another subject."""
    end, head, path = time.monotonic() + 3600 * hours, head_of(run), run.folder / "lines.jsonl"
    if not path.exists():
        path.write_text(json.dumps(head) + "\n", encoding="utf-8")
    known, by_part = read_lines(path)
    if other := next((name for name in head if known.get(name) != head[name]), None):
        what = f"{path} is of another {other}: {known.get(other)}"
        raise HobbitError(f"{what}; give another folder with --output")
    out = path.with_name("report.html")
    for name in ("start", *(name for name in PARTS if name in parts)):
        if "not_run" not in by_part.get(name, {"not_run": ""}):
            continue
        line = start(run) if name == "start" else run_part(run, name, end)
        line = json.loads(json.dumps(line).replace(str(run.model), run.model.name))  # to be sent
        by_part[name] = line
        with path.open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)
        if why := line.get("not_run"):
            _say(f"{name}: not run, {why}")
        write_text(out, page(head, by_part))
    write_text(out, page(head, by_part))
    return out


def print_report(args: Namespace) -> int:
    """Prints the path of the page. Raises HobbitError."""
    for name, n in (("--chunks", args.chunks), ("--reps", args.reps)):
        if n < 1:
            raise ConfigError(f"{name} is {n}; it must be positive")
    check_model_file(args.model)
    opened_info(args.model, {"hobbit.enable": True})  # refuses a dense model
    folder = args.output or args.model.with_name(f"{args.model.stem}-report")
    folder.mkdir(parents=True, exist_ok=True)
    file, text = read_model_file(args.model, None), read_text(args.text)
    given = (args.memory, args.chunks, args.threads, args.reps, args.ctx, args.max_kl)
    try:
        print(report(Run(args.model, text, file, folder, *given), args.hours, args.parts))
    except KeyboardInterrupt:
        _say("stopped; the same command goes on with what is left")
        raise
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Reports; returns the exit status."""
    parser = system.option_parser(__doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="GGUF file; of a split model its first file")
    add("--text", type=Path, required=True, metavar="FILE", help="text of the kind that you ask about")
    add("--memory", type=parse_size, metavar="SIZE", help="limit (default: a quarter of the experts)")
    add("--hours", type=float, default=1.0, metavar="H", help="no part begins later (default: %(default)s)")
    add("--chunks", type=int, default=8, metavar="N", help="parts of the text (default: %(default)s)")
    add("--ctx", type=int, default=Run.n_ctx, metavar="N", help="tokens of a part (default: %(default)s)")
    add("--max-kl", type=float, nargs="+", default=Run.max_kl, metavar="NATS", help="limits of the rules")
    add("--reps", type=int, default=3, metavar="N", help="repetitions of speeds (default: %(default)s)")
    add("--threads", type=int, metavar="N", help="computing threads (default: one per processor core)")
    add("--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="NAME", help=f"of {', '.join(PARTS)}")
    add("-o", "--output", type=Path, metavar="DIR", help="folder (default: MODEL-report)")
    args = parser.parse_args(arguments)
    return ended(lambda: print_report(args))


if __name__ == "__main__":
    sys.exit(main())
