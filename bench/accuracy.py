# SPDX-License-Identifier: MIT
"""Accuracy of a model on the usual tasks, in the configurations of the papers.

Each token gets exactly the precision decided for it, whatever is resident, but where experts are replaced.
The data files:

    HellaSwag        hellaswag_val_full.txt: vendor/llama.cpp/scripts/get-hellaswag.sh
    Winogrande       winogrande-debiased-eval.csv: vendor/llama.cpp/scripts/get-winogrande.sh
    multiple choice  MMLU, ARC, TruthfulQA: the datasets (.bin) of ikawrakow/validation-datasets-for-llama.cpp
    GSM8K            test.jsonl of openai/grade-school-math
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.analysis.part import calibrated
from pyhobbit import Hobbit
from pyhobbit.errors import HobbitError
from pyhobbit.model.model_file import read_model_file
from pyhobbit.native.paths import BIN_DIR
from pyhobbit.settings.papers import settings_of

_KINDS = {".txt": "hellaswag", ".csv": "winogrande", ".bin": "multiple-choice"}
_SHOTS, _ANSWER, _CONTEXT = 4, 512, 4096  # GSM8K's examples, tokens of an answer, context

# The line of each task: how many were done, and the share of right answers so far in %.
_TASK_LINE = re.compile(r"^(\d+)\t *([\d.]+)%?(?:\t.*)?$", re.MULTILINE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# On a busy machine llama-perplexity may end before its last lines are written; one task of many is no loss.
_N_ATTEMPTS, _ENOUGH = 3, 100
_LAST_WORDS = "total time ="
_TYPES = {bool: "bool", int: "int", float: "float"}


@dataclass(frozen=True)
class Score:
    n_tasks: int
    n_right: int

    def __str__(self) -> str:
        share = self.n_right / self.n_tasks
        return f"{share:.1%} ± {math.sqrt(share * (1 - share) / self.n_tasks):.1%}"


def kind_of(path: Path) -> str:
    """The kind of tasks in a file: hellaswag, winogrande, multiple-choice, gsm8k or humaneval.

    Raises HobbitError.
    """
    if not path.is_file():
        raise HobbitError(
            f"the file of tasks {path} does not exist; bench/accuracy.py says where they come from"
        )
    if path.suffix == ".jsonl":
        return "humaneval" if '"entry_point"' in path.read_text("utf-8").partition("\n")[0] else "gsm8k"
    if path.suffix not in _KINDS:
        raise HobbitError(f"{path} is no file of tasks: they end in .jsonl, {', '.join(_KINDS)}")
    return _KINDS[path.suffix]


def arms(model: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Settings of CacheConfig by what they are called, and what is missing for others. Raises HobbitError."""
    file = read_model_file(model)
    strict: dict[str, Any] = {"strict": True}
    found: dict[str, dict[str, Any]] = {
        "all high": {**strict, "t1": 1.0, "t2": 1.0},
        "MoBiLE": {**strict, **settings_of("mobile", {})},
        "half of the experts": {**strict, "rule": "rank"},
        "degraded (DAOP)": {"t1": 1.0, "t2": 1.0, "degrade": True},
    }
    missing = ["early (DAOP): it needs a GPU"]
    if len(file.tiers) < 2:
        missing.append(f"{model} has no low tier: add one with pyhobbit convert --sidecar {model}")
        return found, missing
    if file.calibration is None:
        missing.append(f"{model} has no calibration: make one with pyhobbit calibrate {model} --text FILE")
    found |= {name: {**strict, **own} for name, own in calibrated(model).items()}
    found["HOBBIT"] = {**strict, **settings_of("hobbit", {})}
    return {**found, "low alone": {**strict, "t1": 0.0, "t2": 1.0, "rule": "random"}}, missing


def overrides(settings: Mapping[str, Any]) -> str:
    """The settings as --override-kv takes them."""
    given = {"enable": True, **settings}
    texts = (f"{key}={_TYPES.get(type(value), 'str')}:{str(value).lower()}" for key, value in given.items())
    return ",".join(f"hobbit.{text}" for text in texts)


#
# llama-perplexity's tasks
#


def choices_score(task: str, model: Path, data: Path, settings: Mapping[str, Any], n_tasks: int) -> Score:
    """Raises HobbitError where llama-perplexity cannot read the data."""
    command = [BIN_DIR / "llama-perplexity", "-m", model, "-f", data, f"--{task}", f"--{task}-tasks", n_tasks]
    command += ["--override-kv", overrides(settings), "--verbosity", "4"]
    for _ in range(_N_ATTEMPTS):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode:
            *_, why = ["it gave no reason", *filter(str.strip, done.stderr.splitlines())]
            raise HobbitError(f"llama-perplexity failed on {data}: {why}")
        n, percent = (_TASK_LINE.findall(done.stdout) or [("0", "0")])[-1]
        if int(n) >= _ENOUGH or (int(n) and _LAST_WORDS in done.stderr):
            return Score(int(n), round(int(n) * float(percent) / 100))
    raise HobbitError(f"llama-perplexity found no {task} tasks in {data}: is it such a file?")


#
# GSM8K
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


def score(kind: str, model: Path, data: Path, settings: Mapping[str, Any], n_tasks: int) -> Score:
    """The score on at most n_tasks. Raises HobbitError."""
    if kind != "gsm8k":
        return choices_score(kind, model, data, settings, n_tasks)
    rows = read_gsm8k(data)
    examples, rest = rows[:_SHOTS], rows[_SHOTS:][:n_tasks]
    if not rest:
        raise HobbitError(f"{data} has {len(rows)} questions, and the first {_SHOTS} are shown as examples")
    roles = ("user", "assistant")
    turns: list[Any] = [
        {"role": role, "content": text} for each in examples for role, text in zip(roles, each, strict=True)
    ]
    with Hobbit(model, n_ctx=_CONTEXT, verbose=False, **settings) as llm:

        def ask(question: str) -> str:
            messages = [*turns, {"role": "user", "content": question}]
            answer = llm.create_chat_completion(messages, max_tokens=_ANSWER, temperature=0)
            return answer["choices"][0]["message"]["content"] or ""

        return gsm8k_score(ask, rest)
