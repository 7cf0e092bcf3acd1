# SPDX-License-Identifier: MIT
"""Accuracy on the tiny model: scores of tasks whose answers are plain, and what is missing."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import models
import pytest
from gguf import GGUFValueType, GGUFWriter

from bench import accuracy
from bench.analysis import quality
from bench.analysis.part import Run
from pyhobbit.errors import HobbitError
from pyhobbit.model.model_file import read_model_file

GOOD, BAD = "self.name = name", ("&& zz qx@@", "@@ zq && x", "qq ## @@ z")


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


def test_every_task_is_scored_in_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shutil.copy(models.tiny_tiers("f16", "q4_0"), tmp_path / "tiny.gguf")
    write_calibration(model)
    for name, value in (("_SHOTS", 1), ("_ANSWER", 4), ("_CONTEXT", 512)):
        monkeypatch.setattr(accuracy, name, value)
    programs = tmp_path / "programs.jsonl"
    programs.write_text(json.dumps({"task_id": "a/0", "prompt": "def f():", "entry_point": "f"}) + "\n")
    files = [
        write_hellaswag(tmp_path / "hellaswag.txt"),
        write_winogrande(tmp_path / "winogrande.csv"),
        write_choices(tmp_path / "choices.bin"),
        write_gsm8k(tmp_path / "gsm8k.jsonl"),
        programs,
    ]
    file = read_model_file(model)
    (found,) = quality.tasks(Run(model, "", file, tmp_path, tasks=files))
    rows = {row.pop("setting"): list(row.values()) for row in found["rows"]}
    names = [
        "all high",
        "MoBiLE",
        "half of the experts",
        "degraded (DAOP)",
        "calibrated, gate (Eq. 2)",
        "HOBBIT",
        "low alone",
    ]
    assert list(rows) == [*names, "left out: early (DAOP): it needs a GPU"]
    scores = ["66.7% ± 19.2%", "75.0% ± 21.7%", "50.0% ± 35.4%", "0.0% ± 0.0%"]
    for name in ("all high", "calibrated, gate (Eq. 2)", "HOBBIT", "low alone"):
        assert rows[name] == [*scores, "not run: its answers are programs, and none is executed here"]


def test_what_is_missing_is_said_in_a_sentence(tmp_path: Path) -> None:
    model, data = models.tiny(), write_winogrande(tmp_path / "winogrande.csv")
    with pytest.raises(HobbitError, match=r"no\.jsonl does not exist"):
        accuracy.kind_of(tmp_path / "no.jsonl")
    with pytest.raises(HobbitError, match=r"is no file of tasks: they end in \.jsonl, \.txt, "):
        accuracy.kind_of(model)
    with pytest.raises(HobbitError, match=r"winogrande\.csv is no GSM8K file"):
        accuracy.score("gsm8k", model, data, {}, 1)
    found, missing = accuracy.arms(model)
    with pytest.raises(HobbitError, match="llama-perplexity found no multiple-choice tasks in"):
        accuracy.score("multiple-choice", model, data, found["all high"], 400)
    assert "HOBBIT" not in found
    assert any("no low tier: add one with pyhobbit convert --sidecar" in sentence for sentence in missing)
    found, missing = accuracy.arms(models.tiny_tiers("f16", "q4_0"))
    assert any("has no calibration: make one with pyhobbit calibrate" in sentence for sentence in missing)
    assert "HOBBIT" in found
    assert not any("calibrated" in name for name in found)


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
