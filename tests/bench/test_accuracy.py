# SPDX-License-Identifier: MIT
"""bench/accuracy.py on the tiny model: scores of tasks whose answers are plain, and what is missing."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import models
from gguf import GGUFValueType, GGUFWriter

from bench import accuracy

GOOD, BAD = "self.name = name", ("&& zz qx@@", "@@ zq && x", "qq ## @@ z")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.accuracy", *map(str, arguments)]
    return subprocess.run(command, cwd=models.ROOT, capture_output=True, text=True, timeout=600, check=False)


def write_hellaswag(path: Path) -> Path:
    """Six tasks, two of which call a wrong ending the right one."""
    lines = []
    for i, place in enumerate([0, 1, 2, 3, 0, 1]):
        endings = list(BAD)
        endings.insert(place, GOOD)
        label = place if i < 4 else (place + 1) % 4
        lines += [f"def __init__(self, name{i}):", str(label), *endings]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_winogrande(path: Path) -> Path:
    """Four tasks, three of them labelled right. llama-perplexity leaves out the last line."""
    row = '{},"class A{}: def f(_, x): return self.x",self,@%#,{}\n'
    path.write_text("".join(row.format(i, i, 1 if i < 3 else 2) for i in range(4)) + "\n")
    return path


def write_choices(path: Path) -> Path:
    """Two tasks, one labelled right."""

    def text(value: str) -> bytes:
        return struct.pack("<I", len(value)) + value.encode()

    tasks = [
        text("def __init__(self, name):") + struct.pack("<I", 2) + text(GOOD) + text(BAD[0])
        + struct.pack("<2i", *labels) + struct.pack("<I", 0)
        for labels in ((1, 0), (0, 1))
    ]  # fmt: skip
    starts = [4 + 4 * len(tasks), 4 + 4 * len(tasks) + len(tasks[0])]
    path.write_bytes(struct.pack("<3I", len(tasks), *starts) + b"".join(tasks))
    return path


def write_gsm8k(path: Path) -> Path:
    rows = [{"question": f"{i} + 1?", "answer": f"{i} + 1 is {i + 1}\n#### {i + 1}"} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def write_calibration(model: Path) -> None:
    writer = GGUFWriter(model.with_suffix(".calibration.gguf"), "hobbit-calibration")
    tensors = [t for t in models.GGUFReader(model).tensors if ".low." in t.name]
    sizes = {
        "hobbit.model_bytes": model.stat().st_size,
        "hobbit.low_bytes": sum(int(t.n_bytes) for t in tensors),
    }
    for key, value in sizes.items():
        writer.add_key_value(key, value, GGUFValueType.UINT64)
    for key, share in {"hobbit.t1": 0.6, "hobbit.t2": 0.9}.items():
        writer.add_key_value(key, share, GGUFValueType.FLOAT64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_task_is_scored_in_every_setting(tmp_path: Path) -> None:
    model = shutil.copy(models.tiny_tiers("f16", "q4_0"), tmp_path / "tiny.gguf")
    write_calibration(model)
    tasks = {
        "--hellaswag": write_hellaswag(tmp_path / "hellaswag.txt"),
        "--winogrande": write_winogrande(tmp_path / "winogrande.csv"),
        "--multiple-choice": write_choices(tmp_path / "choices.bin"),
        "--gsm8k": write_gsm8k(tmp_path / "gsm8k.jsonl"),
    }
    options = [word for option in tasks.items() for word in option]
    done = run(model, *options, "--shots", 1, "--tokens", 4, "--ctx", 512, "--memory", "400M")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    names = ("all high", "calibrated", "low alone")
    scores = "66.7% ± 19.2% | 75.0% ± 21.7% | 50.0% ± 35.4% | 0.0% ± 0.0%"
    assert done.stdout.splitlines()[2:] == [f"| {name} | {scores} |" for name in names]


def test_what_is_missing_is_said_in_a_sentence(tmp_path: Path) -> None:
    model, data = models.tiny(), write_winogrande(tmp_path / "winogrande.csv")
    for arguments, says in (
        ((model,), "no data file: give at least one of --hellaswag FILE, --winogrande FILE"),
        ((tmp_path / "no.gguf", "--winogrande", data), "no.gguf does not exist"),
        ((model, "--gsm8k", tmp_path / "no.jsonl"), "no.jsonl does not exist; --help says where --gsm8k"),
        ((models.tiny_tiers("f16", "q4_0"), "--gsm8k", data), "winogrande.csv is no GSM8K file"),
        ((model, "--multiple-choice", data), "llama-perplexity found no multiple-choice tasks in"),
    ):
        done = run(*arguments)
        assert done.returncode == 1
        assert says in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
    done = run(model, "--winogrande", data)
    assert f"left out: {model} has no low tier: add one with pyhobbit convert --sidecar" in done.stderr
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()[2:]] == ["| all high"]
    done = run(models.tiny_tiers("f16", "q4_0"), "--winogrande", data)
    assert "has no calibration: make one with pyhobbit calibrate" in done.stderr
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()[2:]] == ["| all high", "| low alone"]


def test_the_number_of_an_answer_is_behind_the_mark_or_the_last_one() -> None:
    number = accuracy.final_number
    assert number("48 / 2 = 24 clips.\n#### 1,024") == 1024
    assert number("#### -3.5 and 7") == -3.5
    assert number("There are 3, so she pays $18.") == 18
    assert number("I do not know.") is None
    assert number("5 #### none") is None


def test_gsm8k_counts_equal_numbers() -> None:
    tasks = [("a", "#### 1,000"), ("b", "#### 2"), ("c", "#### 3"), ("d", "#### 4")]
    replies = {"a": "so 1000.0", "b": "#### 3", "c": "nothing", "d": "2 + 2 = 4"}
    found = accuracy.gsm8k_score(replies.__getitem__, tasks)
    assert (found.n_tasks, found.n_right) == (4, 2)
    assert str(found) == "50.0% ± 25.0%"
