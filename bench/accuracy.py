# SPDX-License-Identifier: MIT
"""Accuracy of your model on the usual tasks: all high, with its calibration, and with the low tier alone.

    python -m bench.accuracy MODEL.gguf --hellaswag hellaswag_val_full.txt --gsm8k test.jsonl --memory 8G

Each token gets exactly the precision decided for it, whatever is resident. The data files:

    --hellaswag        hellaswag_val_full.txt: vendor/llama.cpp/scripts/get-hellaswag.sh
    --winogrande       winogrande-debiased-eval.csv: vendor/llama.cpp/scripts/get-winogrande.sh
    --multiple-choice  MMLU, ARC, TruthfulQA: the datasets of ikawrakow/validation-datasets-for-llama.cpp
    --gsm8k            test.jsonl of openai/grade-school-math
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tables import option_parser, table_head, table_row
from pyhobbit.errors import HobbitError
from pyhobbit.model.model_file import read_model_file
from pyhobbit.model.names import check_model_file
from pyhobbit.native.paths import BIN_DIR
from pyhobbit.settings.config import Setting, parse_size

TASKS = ("hellaswag", "winogrande", "multiple-choice", "gsm8k")
# The line of each task: how many were done, and the share of right answers so far in %.
_TASK_LINE = re.compile(r"^(\d+)\t *([\d.]+)%?(?:\t.*)?$", re.MULTILINE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# On a busy machine llama-perplexity may end before its last lines are written; one task of many is no loss.
_N_ATTEMPTS, _ENOUGH = 3, 100
_LAST_WORDS = "total time ="
_TYPES = {bool: "bool", int: "int", float: "float"}
_START_S = 600


@dataclass(frozen=True)
class Score:
    n_tasks: int
    n_right: int

    def __str__(self) -> str:
        share = self.n_right / self.n_tasks
        return f"{share:.1%} ± {math.sqrt(share * (1 - share) / self.n_tasks):.1%}"


def arms(model: Path) -> tuple[dict[str, dict[str, Setting]], list[str]]:
    """Settings by what they are called, and what is missing for others. Raises HobbitError."""
    check_model_file(model)
    file = read_model_file(model)
    common: dict[str, Setting] = {"hobbit.enable": True, "hobbit.strict": True}
    found = {"all high": {**common, "hobbit.t1": 1.0, "hobbit.t2": 1.0}}
    missing = []
    if len(file.tiers) < 2:
        missing.append(f"{model} has no low tier: add one with pyhobbit convert --sidecar {model}")
        return found, missing
    if file.calibration is None:
        missing.append(f"{model} has no calibration: make one with pyhobbit calibrate {model} --text FILE")
    else:
        found["calibrated"] = common
    low: dict[str, Setting] = {"hobbit.t1": 0.0, "hobbit.t2": 1.0, "hobbit.rule": "random"}
    return {**found, "low alone": {**common, **low}}, missing


def overrides(settings: Mapping[str, Setting]) -> str:
    """For --override-kv."""
    return ",".join(
        f"{key}={_TYPES.get(type(value), 'str')}:{str(value).lower()}" for key, value in settings.items()
    )


#
# llama-perplexity's tasks
#


def choices_score(task: str, model: Path, data: Path, settings: Mapping[str, Setting], n_tasks: int) -> Score:
    """Raises HobbitError where llama-perplexity cannot read the data."""
    command = [BIN_DIR / "llama-perplexity", "-m", model, "-f", data, f"--{task}", f"--{task}-tasks", n_tasks]
    command += ["--override-kv", overrides(settings), "--verbosity", "4"]
    for _ in range(_N_ATTEMPTS):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode:
            raise HobbitError(f"llama-perplexity failed on {data}: {_last_line(done.stderr)}")
        n, percent = (_TASK_LINE.findall(done.stdout) or [("0", "0")])[-1]
        if int(n) >= _ENOUGH or (int(n) and _LAST_WORDS in done.stderr):
            return Score(int(n), round(int(n) * float(percent) / 100))
    raise HobbitError(f"llama-perplexity found no {task} tasks in {data}: is it such a file?")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it gave no reason"


#
# GSM8K, through the server
#


def read_gsm8k(path: Path) -> list[tuple[str, str]]:
    """Questions and worked answers. Raises HobbitError."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [(row["question"], row["answer"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HobbitError(
            f'{path} is no GSM8K file, lines of {{"question": ..., "answer": ...}}: {error}'
        ) from error


def final_number(text: str) -> float | None:
    """The number after ####, else the last one; None where there is none."""
    numbers = _NUMBER.findall(text.rpartition("####")[2]) if "####" in text else _NUMBER.findall(text)[-1:]
    return float(numbers[0].replace(",", "")) if numbers else None


def gsm8k_score(ask: Callable[[str], str], tasks: list[tuple[str, str]]) -> Score:
    right = [final_number(ask(question)) == final_number(answer) for question, answer in tasks]
    return Score(len(tasks), sum(right))


def asking(url: str, examples: list[tuple[str, str]], n_tokens: int) -> Callable[[str], str]:
    """Answers of a server, after worked examples."""
    turns = [
        {"role": role, "content": text}
        for example in examples
        for role, text in zip(("user", "assistant"), example, strict=True)
    ]

    def ask(question: str) -> str:
        messages = [*turns, {"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": n_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            answer: Any = json.load(reply)
        return str(answer["choices"][0]["message"]["content"])

    return ask


@contextlib.contextmanager
def serving(
    model: Path, settings: Mapping[str, Setting], n_ctx: int, options: Sequence[object] = ()
) -> Iterator[str]:
    """The address of `pyhobbit serve` with these settings and options."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-P", "-m", "pyhobbit", "serve", model, "--override-kv", overrides(settings)]
    command += ["--port", port, "--ctx-size", n_ctx, "--parallel", 1, *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
        try:
            _wait_until_healthy(url, process)
            yield url
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            log.seek(0)
            raise HobbitError(f"the server failed ({error}): {_last_line(log.read())}") from error
        finally:
            process.terminate()
            process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{url}/health").close()
            return
        time.sleep(0.2)
    raise TimeoutError("it did not get ready")


def score(task: str, settings: Mapping[str, Setting], args: argparse.Namespace) -> Score:
    data: Path = getattr(args, task.replace("-", "_"))
    if task != "gsm8k":
        return choices_score(task, args.model, data, settings, args.tasks)
    rows = read_gsm8k(data)
    examples, rest = rows[: args.shots], rows[args.shots :][: args.tasks]
    if not rest:
        raise HobbitError(f"{data} has {len(rows)} questions: give more than --shots {args.shots}")
    with serving(args.model, settings, args.ctx) as url:
        return gsm8k_score(asking(url, examples, args.tokens), rest)


def run(args: argparse.Namespace) -> None:
    """Raises HobbitError."""
    asked = {task: path for task in TASKS if (path := getattr(args, task.replace("-", "_"))) is not None}
    if not asked:
        raise HobbitError(
            f"no data file: give at least one of {', '.join(f'--{task} FILE' for task in TASKS)}"
        )
    for task, path in asked.items():
        if not path.is_file():
            raise HobbitError(
                f"the data file {path} does not exist; --help says where --{task} files come from"
            )
    settings, missing = arms(args.model)
    for sentence in missing:
        print(f"accuracy: left out: {sentence}", file=sys.stderr)
    bound = {} if args.memory is None else {"hobbit.memory": args.memory}
    print(table_head(("setting", *asked)))
    for name, own in settings.items():
        cells = [str(score(task, {**own, **bound}, args)) for task in asked]
        print(table_row((name, *cells)), flush=True)


def main() -> None:
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="GGUF file with a low tier, in it or beside it")
    for task in TASKS:
        add(f"--{task}", type=Path, metavar="FILE")
    add("--tasks", type=int, default=400, help="most tasks of each kind (default: %(default)s)")
    add("--shots", type=int, default=4, help="questions of GSM8K shown as examples (default: %(default)s)")
    add("--tokens", type=int, default=512, help="tokens of an answer to GSM8K (default: %(default)s)")
    add("--ctx", type=int, default=4096, help="context of the server (default: %(default)s)")
    add("--memory", type=parse_size, metavar="SIZE", help="limit for each process, like 8G")
    try:
        run(parser.parse_args())
    except HobbitError as error:
        sys.exit(f"accuracy: error: {error}")


if __name__ == "__main__":
    main()
