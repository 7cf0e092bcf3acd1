# SPDX-License-Identifier: MIT
"""The checks of documents and sizes that `make lint` runs, and the script of CONTRIBUTING.md."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _docs_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield
    for name in ("openings", "check_budget", "picture", "check_layers"):
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


def test_long_sentences_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import openings

    monkeypatch.setattr(openings, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("It reads. " * 9 + "It reads " + "and reads " * 12 + "it.\n", "utf-8")
    assert list(openings.long_sentences()) == [
        "README.md: more than a tenth of the sentences has over 25 words"
    ]
    (tmp_path / "README.md").write_text("    It reads " + "and reads " * 12 + "it.\n\nIt reads.\n", "utf-8")
    assert list(openings.long_sentences()) == []


def _pairs(name: str) -> list[list[str]]:
    """The lines of a table beside this file: a text that is refused, and its rewrite."""
    lines = Path(__file__).with_name(name).read_text("utf-8").splitlines()
    return [line.split("\t") for line in lines]


@pytest.mark.parametrize(("refused", "taken"), _pairs("sentences.tsv"))
def test_a_sentence_without_a_subject_is_refused_and_its_rewrite_taken(
    refused: str, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openings

    monkeypatch.setattr(openings, "ROOT", tmp_path)
    texts = {"a.py": '"""{}"""\n', "b.py": 'what = "{}"\n', "a.h": "// {}\nint n;\n"}
    for name, text in texts.items():
        if name != "b.py" or refused[0].islower():
            (tmp_path / name).write_text(text.format(refused), "utf-8")
            assert len([*openings.problems(tmp_path / name)]) == 1, name
            (tmp_path / name).write_text(text.format(taken), "utf-8")
            assert [*openings.problems(tmp_path / name)] == []


@pytest.mark.parametrize(("refused", "taken"), _pairs("titles.tsv"))
def test_an_unclear_title_is_refused_and_its_rewrite_taken(refused: str, taken: str) -> None:
    (title,) = re.findall(r"(?m)^regex = (.*)", (ROOT / ".gitlint").read_text("utf-8"))
    assert not re.search(title, refused)
    assert re.search(title, taken)


@pytest.fixture
def check_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[dict[str, int]], list[str]]:
    """Checks a repository of eleven files against a budget; returns what is refused."""
    import check_budget

    monkeypatch.setattr(sys, "argv", ["check_budget.py"])
    monkeypatch.setattr(check_budget, "ROOT", tmp_path)
    monkeypatch.setattr(check_budget, "BUDGET", tmp_path / "budget.toml")
    files = {
        "Makefile": 1,
        ".ci/run": 2,
        "ggml_ext/src/io/loader.cpp": 4,
        "pyhobbit/cli/top.py": 8,
        "patches/0001.patch": 16,
        "tests/modelled_device/streams.cpp": 32,
        "tests/cli/test_top.py": 64,
        "docs/a.md": 128,
        "docs/results/b.md": 256,
        "README.md": 512,
        "docs/results/c.jsonl": 1024,
    }
    for name, lines in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("line\n" * lines)
    for command in ("init", "add ."):
        subprocess.run(["git", "-C", tmp_path, *command.split()], capture_output=True, check=True)

    def refused(budget: dict[str, int]) -> list[str]:
        check_budget.BUDGET.write_text("".join(f'"{key}" = {number}\n' for key, number in budget.items()))
        code = check_budget.main()
        lines = capsys.readouterr().err.splitlines()
        assert code == bool(lines)
        return lines

    return refused


BUDGET = {
    "all": 63,
    ".": 1,
    ".ci": 2,
    "ggml_ext/src/io": 4,
    "pyhobbit/cli": 8,
    "patches": 16,
    "tests/modelled_device": 32,
    "docs/*.md": 128,
    "docs/results/*.md": 256,
}


def test_code_and_pages_are_counted_and_tests_and_data_are_not(
    check_budget: Callable[[dict[str, int]], list[str]],
) -> None:
    assert check_budget(BUDGET) == []


@pytest.mark.parametrize("key", BUDGET)
def test_what_exceeds_its_budget_is_named(
    key: str, check_budget: Callable[[dict[str, int]], list[str]]
) -> None:
    number = BUDGET[key]
    refused = check_budget({**BUDGET, key: number - 1})
    assert refused[0] == f"{key} has {number} lines, docs/budget.toml allows {number - 1}: remove some"


def test_a_folder_gets_more_only_if_another_one_gets_less(
    check_budget: Callable[[dict[str, int]], list[str]],
) -> None:
    (refused,) = check_budget({**BUDGET, "pyhobbit/cli": 9})
    assert refused == "docs/budget.toml allows its folders 64 lines, more than all: lower one"


def test_a_line_for_an_empty_folder_is_refused(check_budget: Callable[[dict[str, int]], list[str]]) -> None:
    assert check_budget({**BUDGET, "bench": 0}) == ["docs/budget.toml has a line for bench, which is empty"]


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_pages_lead_to_files_and_headings() -> None:
    command = ["git", "-C", ROOT, "ls-files", "-z", "*.md"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    broken, n_links = [], 0
    for page in (ROOT / name for name in names):
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text("utf-8")):
            name, _, anchor = link.partition("#")
            target = (page.parent / name) if name else page
            n_links += 1
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                broken.append(f"{page.name}: {link}")
    assert n_links > 100
    assert broken == []


def test_an_include_against_the_order_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import check_layers

    monkeypatch.setattr(check_layers, "ROOT", tmp_path)
    files = {
        "llama_ext/bridge/a.h": "b.h",
        "llama_ext/server/b.h": "a.h",
        "llama_ext/cpu/c.h": "d.h",
        "llama_ext/cpu/d.h": "ggml.h",
        "ggml_ext/src/base/e.h": "c.h",
    }
    for name, included in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'#include "{included}"\n', "utf-8")
    *upward, circle = check_layers.problems("llama_ext")
    assert [text.split(", which comes later")[0] for text in sorted(upward)] == [
        "llama_ext/bridge/a.h uses server/b.h",
        "llama_ext/ggml_ext/src/base/e.h uses cpu/c.h",
    ]
    assert circle.startswith("llama_ext: a circle: ")


def test_a_declaration_by_hand_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import check_layers

    monkeypatch.setattr(check_layers, "ROOT", tmp_path)
    (tmp_path / "llama_ext").mkdir()
    (tmp_path / "llama_ext/bridge.h").write_text("API int * ours(int n,\n  int m);\n", "utf-8")
    (tmp_path / "llama_ext/a.cpp").write_text(
        'extern "C" API int * ours(int n);\nint theirs(int);\n', "utf-8"
    )
    (tmp_path / "llama_ext/b.cpp").write_text("static const int is = ours(5, 4);\n  ours(5, 4);\n", "utf-8")
    assert list(check_layers.declared_by_hand()) == ["a.cpp declares ours by hand"]


@pytest.mark.model
def test_the_plan_of_a_layer_is_printed(tiny_gguf: Path) -> None:
    script, thresholds = ROOT / "tests" / "print_plan.py", ["--t1", "0.6", "--t2", "0.9"]
    command = [sys.executable, script, tiny_gguf, *thresholds, "--tokens", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    uses = re.findall(r"(?:: |, )\d+ 0\.\d\d (high|low|skipped)", printed)
    assert re.match(r"token 0, layer 0: \d+ 0\.\d\d high, ", printed)
    assert set(uses) == {"high", "low", "skipped"}


def test_the_readme_clones_from_the_projects_address() -> None:
    urls = re.findall(r'(?m)^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert re.findall(r"(?m)^git clone (\S+)", (ROOT / "README.md").read_text("utf-8")) == urls
    assert len(urls) == 1


def test_the_readmes_picture_has_the_figures_of_its_table() -> None:
    import picture  # lies in docs/

    found = picture.read((ROOT / "docs/results/q4_k_m.md").read_text("utf-8"))
    drawn = (ROOT / "docs/speed-by-memory.svg").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    for arms, _ in picture.LINES.values():
        for arm in arms:
            assert found[arm]
            for _, speed in found[arm]:
                assert f">{speed:.3g}</text>" in drawn
                assert f"| {speed:.1f} |" in readme


@pytest.mark.parametrize(
    "page", ["README", *(f"docs/{n}" for n in ["getting-started", "chat", "server", "gpu", "python"])]
)
def test_a_page_for_users_begins_with_a_command(page: str) -> None:
    lines = (ROOT / f"{page}.md").read_text().splitlines()
    assert next(n for n, line in enumerate(lines, 1) if line.startswith("```")) <= 25
    assert len((ROOT / "README.md").read_text().split()) < 1000


def test_the_table_of_free_memory_names_the_files_that_are_read() -> None:
    code = (ROOT / "ggml_ext/src/base/system-memory.cpp").read_text()
    rows = (ROOT / "docs/getting-started.md").read_text().split("| free is the least")[1].split("\n\n")[0]
    named = set(re.findall(r"`(memory\.[\w.]+|MemAvailable|c_min)`", rows))
    unread = {"memory.swap.max", "memory.memsw"}
    assert named == {*unread, "memory.max", "memory.high", "memory.limit_in_bytes", "MemAvailable", "c_min"}
    assert {each for each in named if each not in code} == unread
    assert "evictable" in code
