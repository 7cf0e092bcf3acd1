# SPDX-License-Identifier: MIT
"""Checks that tests fail if the code is wrong.

    python tests/mutants/run.py listed [NAME...]
    python tests/mutants/run.py sampled [FILE...] [--count N] [--seed SEED]

listed: the mutants of listed.py, each with the one test that must fail; NAME is how theirs begin. sampled: N
small changes of each file below, with the tests of its own, which must pass without one. Prints a table
and each mutant that survives.
Exits with 1 where one does that is not known as equivalent.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from equivalent import EQUIVALENT
from listed import LISTED
from operators import sample
from overlay import BUILD, ROOT, BuildError, Mutant, covered, fails

CORE = "ggml_ext/src"
INDEX = (
    "expert-index",
    "refused-index",
    "sidecar",
    "partial-format",
    "gguf-file",
    "hobbit",
)
# [file]: the tests that are to find its mutants
MODULES: dict[str, tuple[str, ...]] = {
    f"{CORE}/policy/scoring-policies.cpp": ("test-cache-policy", "test-pool-policies"),
    f"{CORE}/plan/gate-rule.cpp": ("test-precision-rule", "test-layer-step"),
    f"{CORE}/plan/price-rule.cpp": ("test-price-rule",),
    f"{CORE}/plan/precision-rule.cpp": ("test-precision-rule", "test-price-rule", "test-layer-step"),
    f"{CORE}/cache/resident-set.cpp": ("test-resident-set",),
    f"{CORE}/plan/memory-budget.cpp": ("test-memory-budget", "test-device-budget"),
    f"{CORE}/model/expert-index.cpp": tuple(f"test-{name}" for name in INDEX),
    f"{CORE}/engine/settings.cpp": ("test-settings", "test-stored-settings"),
    "pyhobbit/settings/config.py": ("tests/settings/test_config.py",),
}


def passes(test: str) -> bool:
    """Runs the test without a mutant; True: it passes."""
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    return covered({}, pytest if "." in test else [str(BUILD / "bin" / test)]).returncode == 0


def run_listed(names: Sequence[str]) -> int:
    survivors = 0
    print("| mutant | test | without it | with it |\n|---|---|---|---|")
    for mutant in LISTED:
        if names and not any(mutant.name.startswith(name) for name in names):
            continue
        before = all(map(passes, mutant.tests))
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            is_found = bool(fails(mutant, Path(folder)))
        survivors += not (before and is_found)
        shown = mutant.tests[0].removeprefix("tests/")
        verdicts = "passes" if before else "FAILS", "fails" if is_found else "PASSES"
        print(f"| {mutant.name} | `{shown}` | {verdicts[0]} | {verdicts[1]} |", flush=True)
    return survivors


def mutants(file: str, seed: int) -> Sequence[Mutant]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return [
        Mutant(_place(text, c.offset), file, c.old, c.new, MODULES[file], offset=c.offset)
        for c in sample(file, text, seed)
    ]


def check_unchanged(file: str) -> None:
    """Raises ValueError where a test fails without a change, so that all mutants would seem to be killed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        test = fails(Mutant("unchanged", file, "", "", MODULES[file], offset=0), Path(folder))
    if test:
        raise ValueError(f"{test} fails without any change of {file}; run make build, or see the test")


def _place(text: str, offset: int) -> str:
    """The line with the change, which says more than its number."""
    begin = text.rfind("\n", 0, offset) + 1
    line = text[begin : text.find("\n", offset)]
    column = offset - begin
    return f"{line[:column]}<{line[column:]}".strip()


def run_sampled(files: Sequence[str], count: int, seed: int) -> int:
    unknown, n_all, n_equivalent, n_killed = 0, 0, 0, 0
    print("| file | mutants | killed | equivalent | survive |\n|---|---|---|---|---|")
    for file in files:
        killed, equivalent, survivors = 0, 0, []
        check_unchanged(file)
        for mutant in mutants(file, seed):
            if killed + equivalent + len(survivors) == count:
                break
            key = f"{mutant.name} -> {mutant.new}"
            try:
                with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
                    is_found = bool(fails(mutant, Path(folder)))
            except BuildError:
                continue
            killed += is_found
            if not is_found:
                equivalent += key in EQUIVALENT
                survivors += [key] if key not in EQUIVALENT else []
        n = killed + equivalent + len(survivors)
        print(f"| `{file}` | {n} | {killed} | {equivalent} | {len(survivors)} |", flush=True)
        for key in survivors:
            print(f"  survives: {key}", flush=True)
        unknown += len(survivors)
        n_all, n_killed, n_equivalent = n_all + n, n_killed + killed, n_equivalent + equivalent
    share = n_killed / max(1, n_all - n_equivalent)
    print(f"| all | {n_all} | {n_killed} | {n_equivalent} | {unknown} |")
    print(f"killed: {share:.1%} of those that can be")
    return unknown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["listed", "sampled"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.what == "listed":
        return min(1, run_listed(args.names))
    files = [file for file in MODULES if not args.names or any(name in file for name in args.names)]
    return min(1, run_sampled(files, args.count, args.seed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as e:
        sys.exit(str(e))
    except subprocess.CalledProcessError as e:
        sys.exit(f"{e}\n{e.stderr}")
