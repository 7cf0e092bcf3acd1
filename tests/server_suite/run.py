# SPDX-License-Identifier: MIT
"""Runs llama.cpp's own server tests, offline with a tiny model, on our llama-server and on stock's.

Ours keeps the experts in pools that hold a third of them, everything in high precision. Exit status 1 where a
test fails with ours and passes with stock. Needs `make build stock` and the packages of pyhobbit[test].
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

import models  # noqa: E402
import offline  # noqa: E402
from ports import free_port  # noqa: E402

SUITE = "tools/server/tests"  # in llama.cpp's sources
MODEL = "tiny.gguf"
POOLS = 6_000_000
TIMEOUT_S = 3600


@dataclass(frozen=True)
class Result:
    """One test. outcome: passed, failed or skipped.  why: first line of the reason."""

    outcome: str
    why: str = ""


def read_report(path: Path) -> dict[str, Result]:
    """Results by test, from a JUnit report."""
    results = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        reason = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        if reason is None:
            results[name] = Result("passed")
        else:
            outcome = "skipped" if reason.tag == "skipped" else "failed"
            results[name] = Result(outcome, (reason.get("message") or "").partition("\n")[0])
    return results


def run_pytest(
    options: Sequence[str | Path], folder: Path, *, cwd: Path, environment: Mapping[str, str]
) -> dict[str, Result]:
    """Runs pytest, which writes its report and log into a folder."""
    report, log = folder / "report.xml", folder / "pytest.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    with log.open("w") as output:
        subprocess.run(
            [*command, *options], cwd=cwd, env=environment, timeout=TIMEOUT_S, check=False, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    if not report.exists() or "collection failure" in report.read_text():
        raise SystemExit(f"the tests did not run:\n{log.read_text()[-4000:]}")
    return read_report(report)


def run_suite(server: Path, folder: Path, selection: list[str]) -> dict[str, Result]:
    """Runs the suite in a folder that prepare() has made, with a build of llama-server."""
    environment = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": str(server),
        "PYTHONPATH": str(Path(__file__).parent),
        "PORT": str(free_port()),
    }
    options = ["-p", "offline", f"{offline.OPTION}={folder / MODEL}", "-m", "not slow", *selection]
    return run_pytest(options, folder, cwd=folder / SUITE, environment=environment)


def prepare(folder: Path) -> None:
    """Copies what the suite needs; the sidecar beside the model makes ours keep its experts in pools."""
    for part in (SUITE, "models/templates"):
        shutil.copytree(models.ROOT / "vendor/llama.cpp" / part, folder / part)
    (folder / SUITE / "tmp").mkdir()
    model = models.tiny_sidecar("f16", "q4_0")
    for file in model.parent.glob("tiny-f16*.gguf"):
        shutil.copy(file, folder / file.name.replace("tiny-f16", "tiny"))


def ours(folder: Path) -> Path:
    """A program that is our llama-server with small pools."""
    script = folder / "llama-server-small-pools"
    server = models.bin_dir() / "llama-server"
    script.write_text(f'#!/bin/sh\nexec {server} --override-kv hobbit.pools=int:{POOLS} "$@"\n')
    script.chmod(0o755)
    return script


def summary(results: dict[str, Result]) -> str:
    counts = Counter(result.outcome for result in results.values())
    ran = counts["passed"] + counts["failed"]
    return f"{ran} ran, {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def compare(stock: dict[str, Result], patched: dict[str, Result], *, verbose: bool) -> int:
    """Prints what differs. Returns 1 where a test fails with ours and passes with stock."""
    print(f"stock: {summary(stock)}")
    print(f"ours:  {summary(patched)}")
    reasons = Counter(result.why for result in patched.values() if result.outcome == "skipped")
    for reason, n in reasons.most_common():
        print(f"skipped: {n:3d}  {reason}")
    both = [test for test in patched if patched[test].outcome == stock[test].outcome == "failed"]
    for file, n in Counter(test.partition("::")[0] for test in both).most_common():
        print(f"fails with both: {n:3d}  {file}")
    for test in both if verbose else ():
        print(f"  {test}: {patched[test].why}")
    worse = [t for t, r in patched.items() if r.outcome != "passed" and stock[t].outcome == "passed"]
    for test in worse:
        print(f"FAILS WITH OURS ALONE: {test}: {patched[test].why}")
    for test in stock:
        if stock[test].outcome == "failed" and patched[test].outcome == "passed":
            print(f"fails with stock alone: {test}: {stock[test].why}")
    print(f"fails with ours and passes with stock: {len(worse)}")
    return 1 if worse else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("selection", nargs="*", help="for pytest, such as unit/test_basic.py (default: all)")
    parser.add_argument("--verbose", action="store_true", help="name the tests that fail with both")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pyhobbit-suite-") as name:
        folder = Path(name)
        prepare(folder)
        stock = run_suite(models.stock_dir() / "llama-server", folder, args.selection)
        patched = run_suite(ours(folder), folder, args.selection)
    return compare(stock, patched, verbose=args.verbose)


if __name__ == "__main__":
    sys.exit(main())
