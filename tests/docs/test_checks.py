# SPDX-License-Identifier: MIT
"""The checks of documents and sizes that `make lint` runs, and the script of CONTRIBUTING.md."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _docs_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield
    for name in ("openings", "check_budget", "picture", "sentences"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.h", "// Reads.\n// Of two, one.\nint n; // none of them\n\n/* Whether it is. */\n", [1, 3, 5]),
        ("a.cpp", 'help = "Sets it. "\n    "What it is.";\n// offset, or\n// of one', [1]),
        (
            "a.py",
            '"""Reads.\n\nWho waits."""\nx = 1  # what it is\ny = "none"\nadd(help="of it")\n',
            [1, 4, 6],
        ),
        ("a.md", "# What it is\n\nReads.\nNone reads.\n\n- Whether it is?\n- Of what?\n\n    Of it\n", [3]),
        ("a.patch", "+++ Of\n-// Of it\n+// Whether it is\n", [3]),
        ("Makefile", "# Of it\nall: # what\n\t@echo '# Of'\n", [1, 2]),
    ],
)
def test_sentences_without_a_subject_are_found(
    name: str, text: str, lines: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openings

    monkeypatch.setattr(openings, "ROOT", tmp_path)
    (tmp_path / name).write_text(text, "utf-8")
    found = [int(problem.split(":")[1]) for problem in openings.problems(tmp_path / name)]
    assert sorted(found) == lines


def test_a_folder_above_its_budget_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import check_budget

    lines = check_budget.lines_by_folder()
    monkeypatch.setattr(sys, "argv", ["check_budget.py"])
    monkeypatch.setattr(check_budget, "BUDGET", tmp_path / "budget.toml")
    numbers = {**lines, "all": sum(lines.values()), "convert": lines["convert"] - 1}
    check_budget.BUDGET.write_text("".join(f'"{folder}" = {n}\n' for folder, n in numbers.items()))
    assert check_budget.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"convert has {lines['convert']} lines, ")


@pytest.mark.model
def test_the_plan_of_a_layer_is_printed(tiny_gguf: Path) -> None:
    script, thresholds = ROOT / "tests" / "print_plan.py", ["--t1", "0.6", "--t2", "0.9"]
    command = [sys.executable, script, tiny_gguf, *thresholds, "--tokens", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    uses = re.findall(r"(?:: |, )\d+ 0\.\d\d (high|low|skipped)", printed)
    assert re.match(r"token 0, layer 0: \d+ 0\.\d\d high, ", printed)
    assert set(uses) == {"high", "low", "skipped"}


def test_the_readmes_picture_has_the_figures_of_its_table() -> None:
    import picture  # lies in docs/

    found = picture.read((ROOT / "docs/measurements.md").read_text("utf-8"))
    drawn = (ROOT / "docs/speed-by-memory.svg").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    for arms, _ in picture.LINES.values():
        for arm in arms:
            assert found[arm]
            for _, speed in found[arm]:
                assert f">{speed:.3g}</text>" in drawn
                assert f"| {speed:.1f} |" in readme
