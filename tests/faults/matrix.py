# SPDX-License-Identifier: MIT
"""The fault matrix: what a failing, short, slow or hanging file call does, wherever it happens.

    python tests/faults/matrix.py [--small] [--place PLACE ...] [--model MODEL ...] [--jobs N]

Each case runs in a process of its own with one fault. Its outcome is the right text or file, a clear error,
or one of those that must not be: crash (a traceback counts), hang, wrong. Prints kind x place x count x
outcome, and each bad case; exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import models  # noqa: E402
import servers  # noqa: E402

TIMEOUT_S = 300
READS = (
    *("EIO", "EAGAIN", "ESTALE", "EINTR", "ENOMEM", "short", "one", "end", "slow", "hang"),
    *("truncate", "replace", "delete"),
)
OPENS = ("EMFILE", "EACCES", "EINTR", "EIO", "ENOMEM", "replace", "delete")
WRITES = ("ENOSPC", "EIO", "EDQUOT", "EFBIG", "EINTR", "short")
CHANGES = ("truncate", "replace", "delete")
GOOD = ("right", "clear")
OUTCOMES = (*GOOD, "crash", "hang", "wrong", "not hit")


@dataclass(frozen=True)
class Case:
    """at: of the calls, as a share of those that a run without a fault makes; or a number, from 0."""

    place: str
    model: str
    call: str
    kind: str
    at: float

    @property
    def name(self) -> str:
        return f"{self.place} {self.model} {self.call} {self.kind} at {self.at:g}"


@dataclass(frozen=True)
class Result:
    status: int | None
    out: str
    err: str
    calls: int
    hits: int


class Runners:
    """Processes that run cases, as many as jobs."""

    def __init__(self, shim: Path, n: int) -> None:
        self._free: Queue[subprocess.Popen[str]] = Queue()
        environment = {**os.environ, "LD_PRELOAD": str(shim), "OMP_WAIT_POLICY": "passive"}
        for _ in range(n):
            command = [sys.executable, "-P", str(HERE / "runner.py")]
            self._free.put(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
                )
            )

    def run(self, **case: Any) -> Result:
        runner = self._free.get()
        try:
            runner.stdin.write(json.dumps({"timeout": TIMEOUT_S, **case}) + "\n")
            runner.stdin.flush()
            status = json.loads(runner.stdout.readline())
        finally:
            self._free.put(runner)
        folder = Path(case["folder"])
        counts = {"calls": 0, "hits": 1}  # counts of a process that a signal ended
        if (folder / "counts").exists():
            counts = json.loads((folder / "counts").read_text())
        texts = [(folder / name).read_text(errors="replace") for name in ("out", "err")]
        return Result(status, *texts, **counts)

    def close(self) -> None:
        while not self._free.empty():
            with self._free.get():  # closes its pipes and waits
                pass


def outcome_of(result: Result, hits: int, is_right: bool) -> str:
    """Names one of OUTCOMES, of a program that a fault hit so often."""
    if result.status is None:
        return "hang"
    if hits == 0:
        return "not hit"
    if result.status == 0:
        return "right" if is_right else "wrong"
    is_clear = result.status in (1, 2) and "pyhobbit: " in result.err and "Traceback" not in result.err
    return "clear" if is_clear else "crash"


class Matrix:
    """Runs cases. folder: for files."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self.shim = build_shim(folder)
        self._runners = Runners(self.shim, jobs)
        self._right: dict[tuple[str, str], Any] = {}
        self._calls: dict[tuple[str, str, str], int] = {}

    def close(self) -> None:
        self._runners.close()

    def prepare(self, case: Case) -> None:
        """Runs the case's place without a fault: what is right, and how many calls there are."""
        key = (case.place, case.model, case.call)
        if key not in self._calls:
            result, made = self._run(case, f"{case.call}:none:0:0")
            if result.status != 0:
                raise RuntimeError(f"{case.name} fails without a fault:\n{result.err}")
            self._calls[key] = result.calls
            self._right[case.place, case.model] = made

    def outcome(self, case: Case) -> tuple[str, str]:
        """Its name, and what the program said."""
        n = self._calls[case.place, case.model, case.call]
        at = int(case.at) if case.at >= 1 or n == 0 else min(n - 1, int(case.at * n))
        count = 3 if case.kind == "EINTR" else 2 if case.call == "rename" else 1  # a link, and then a rename
        result, made = self._run(case, f"{case.call}:{case.kind}:{at}:{count}")
        return self._judge(case, result, made), result.err.strip()

    def _judge(self, case: Case, result: Result, made: Any) -> str:
        outcome = outcome_of(result, result.hits, made == self._right[case.place, case.model])
        is_cut = case.place in ("convert", "calibrate") and made is not None  # a file that is not whole
        return "wrong" if outcome == "clear" and is_cut else outcome

    def _run(self, case: Case, rule: str) -> tuple[Result, Any]:
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        try:
            source = MODELS[case.model]()
            model = copy_of(source, folder) if case.kind in CHANGES or case.place == "calibrate" else source
            if case.place == "serve":
                return self._serve(model, folder, rule)
            made = folder / "made" / "made.gguf"
            made.parent.mkdir()
            path = (
                str(model.parent / stem_of(model))
                if case.call not in ("write", "sync", "rename", "resize")
                else "made"
            )
            arguments = ["--low", "q4_0", str(model), "-o", str(made)]
            if case.place == "calibrate":
                made = model.with_name(model.stem + ".calibration.gguf")
                path = path if case.call == "read" else "calibration"
                text = HERE.parent / "tiny_moe/heldout.txt"
                arguments = [
                    str(model),
                    "--text",
                    str(text),
                    "--chunks",
                    "4",
                    "--ctx",
                    "64",
                    "--set",
                    "rule=gate",
                ]
            fault = f"{rule}:{path}:"
            result = self._runners.run(
                place=case.place, model=str(model), fault=fault, folder=str(folder), arguments=arguments
            )
            if case.place not in ("convert", "calibrate"):
                return result, result.out
            left = [p for p in made.parent.iterdir() if p.suffix == ".tmp"]
            return result, left or (made.read_bytes() if made.exists() else None)
        finally:
            shutil.rmtree(folder)

    def _serve(self, model: Path, folder: Path, rule: str) -> tuple[Result, Any]:
        """One request while the fault strikes; then what the server says of itself."""
        armed, log = folder / "armed", folder / "log"
        os.environ["FAULT"] = f"{rule}:{model.parent / stem_of(model)}:{armed}"
        os.environ["LD_PRELOAD"] = str(self.shim)
        try:
            timeout = ("--override-kv", "hobbit.read_timeout=int:2")
            with servers.serving(model, log, "--pools", "3M", "--parallel", 1, *timeout) as server:
                del os.environ["LD_PRELOAD"]
                armed.touch()
                answer = server.request(
                    "/completion", {"prompt": servers.PROMPT, "n_predict": 12, "temperature": 0}
                )
                armed.unlink()
                health, cache = server.request("/health"), server.request("/hobbit")
                server.process.terminate()
                status = server.process.wait(timeout=30)
        except (AssertionError, ConnectionError) as e:
            return Result(-1, "", f"Traceback {e} {log.read_text(errors='replace')[-2000:]}", 0, 1), None
        except subprocess.TimeoutExpired:
            return Result(None, "", "", 0, 1), None
        finally:
            os.environ.pop("LD_PRELOAD", None)
            del os.environ["FAULT"]
        assert cache.status == 200
        if status != 0:
            return Result(status, "", "Traceback at its end", 0, 1), None
        if answer.status == 200:
            return Result(0, "", "", 12, 1), answer.json["content"]
        says_so = answer.status == 500 and health.status == 503 and answer.error
        return Result(1, "", f"{'pyhobbit: ' if says_so else 'Traceback '}{answer.text}", 0, 1), None


def stem_of(model: Path) -> str:
    """Prefix of the names of all its files."""
    return model.name.removesuffix(".gguf").partition("-00001-of-")[0]


def copy_of(model: Path, folder: Path) -> Path:
    for path in model.parent.glob(f"{stem_of(model)}*.gguf"):
        if path.stem == model.stem or "-of-" in path.stem or path.name.endswith(".hobbit.gguf"):
            shutil.copyfile(path, folder / path.name)
    return folder / model.name


def build_shim(folder: Path) -> Path:
    path = folder / "shim.so"
    command = [
        os.environ.get("CC", "cc"),
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        path,
        HERE / "shim.c",
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(list(map(str, command)), check=True)
    return path


MODELS = {
    "tiers": lambda: models.tiny_tiers("q8_0", "q4_0"),
    "sidecar": lambda: models.tiny_sidecar("q8_0", "q4_0"),
    "split": lambda: models.split(models.tiny),
    "plain": models.tiny,
}


def cases(small: bool) -> Iterator[Case]:
    """The matrix; small: some cases of each place but calibrate and serve."""
    computed = ("tiers",) if small else ("tiers", "sidecar", "split")
    shares = (0.5,) if small else (0, 0.01, 0.1, 0.3, 0.6, 0.99)
    reads = ("EIO", "EINTR", "short", "end", "hang", "truncate") if small else READS
    for place, model, kind, at in itertools.product(("load", "prompt", "decode"), computed, reads, shares):
        if (place, kind) != ("load", "hang"):  # most are llama.cpp's own reads, which wait (docs/security.md)
            yield Case(place, model, "read", kind, at)
    for model, kind, at in itertools.product(computed, OPENS[:1] if small else OPENS, (0, 1, 2, 3)):
        yield Case("load", model, "open", kind, at)
    for call, kinds in (("write", WRITES), ("sync", ("EIO", "ENOSPC")), ("rename", ("EACCES", "ENOSPC"))):
        for kind, at in itertools.product(kinds[:1] if small else kinds, shares if call == "write" else (0,)):
            yield Case("convert", "plain", call, kind, at)
    if small:
        return
    convert_reads = [kind for kind in READS if kind != "hang"]
    for kind, at in itertools.product(convert_reads, (0, 0.1, 0.5, 0.99)):
        yield Case("convert", "plain", "read", kind, at)
    yield Case("convert", "plain", "resize", "ENOSPC", 0)
    for kind, at in itertools.product(("EIO", "EINTR", "short", "end", "slow"), (0.01, 0.3, 0.9)):
        yield Case("calibrate", "tiers", "read", kind, at)
    for kind, at in itertools.product(("ENOSPC", "EIO", "EINTR", "short"), (0, 0.99)):
        yield Case("calibrate", "tiers", "write", kind, at)
    for kind, at in itertools.product(READS, (1, 200)):
        yield Case("serve", "tiers", "read", kind, at)


def run_all(chosen: list[Case], folder: Path, jobs: int) -> list[tuple[Case, str, str]]:
    """Outcome of each case, and its program's output."""
    matrix = Matrix(folder, jobs)
    try:
        for case in chosen:
            matrix.prepare(case)
        served = [case for case in chosen if case.place == "serve"]  # by environment variables: one at a time
        others = [case for case in chosen if case.place != "serve"]
        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(matrix.outcome, others))
        results += map(matrix.outcome, served)
    finally:
        matrix.close()
    return [(case, *result) for case, result in zip([*others, *served], results, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="the subset that the tests run")
    parser.add_argument("--place", nargs="+", help="load, prompt, decode, convert, calibrate, serve")
    parser.add_argument("--model", nargs="+", help=", ".join(MODELS))
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    chosen = [
        case
        for case in cases(args.small)
        if case.place in (args.place or [case.place]) and case.model in (args.model or [case.model])
    ]
    with tempfile.TemporaryDirectory(prefix="hobbit-faults-") as folder:
        results = run_all(chosen, Path(folder), args.jobs)
    table: dict[tuple[str, str, str], Counter[str]] = {}
    for case, outcome, _ in results:
        table.setdefault((case.place, case.call, case.kind), Counter())[outcome] += 1
    print(f"{'place':10} {'call':7} {'kind':9}" + "".join(f"{name:>8}" for name in OUTCOMES))
    for key, counts in table.items():
        print("{:10} {:7} {:9}".format(*key) + "".join(f"{counts[name] or '-':>8}" for name in OUTCOMES))
    total = Counter(outcome for _, outcome, _ in results)
    print(f"{'all':10} {'':7} {'':9}" + "".join(f"{total[name]:>8}" for name in OUTCOMES))
    bad = [(case, outcome, said) for case, outcome, said in results if outcome not in (*GOOD, "not hit")]
    for case, outcome, said in bad:
        print(f"\n{outcome}: {case.name}\n{said[-1500:]}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
