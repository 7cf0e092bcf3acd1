# SPDX-License-Identifier: MIT
"""Compares a wheel with a stock llama.cpp of the same options: python variants.py WHEEL STOCK [KIND ...]

For each kind of processor that ggml has kernels for, or for the named ones, it runs the exactness tests with
these kernels alone. STOCK: the folder of its libraries, from `make wheel-stock`. Prints a table. `--python`:
a command that runs Python for the wheel's processor; `--select`: the tests, as pytest's -k.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests/engine/test_exactness.py"
PREFIX = "libggml-cpu-"


def with_one_kind(folder: Path, kind: str, into: Path) -> Path:
    """A folder with these libraries, but of the CPU's kernels only those of one kind."""
    into.mkdir(parents=True)
    for library in folder.glob("lib*.so*"):
        if not library.name.startswith(PREFIX) or library.name.split(".so")[0] == PREFIX + kind:
            os.link(library.resolve(), into / library.name)
    return into


def compare(kind: str, libraries: Path, stock: Path, args: argparse.Namespace, folder: Path) -> str:
    """Returns the counts of tests that pytest prints."""
    folders = {
        "LIB_DIR": with_one_kind(libraries, kind, folder / kind / "ours"),
        "STOCK_DIR": with_one_kind(stock, kind, folder / kind / "stock"),
        "STOCK_TOOLS": ROOT / "build/stock/bin",
    }
    environment = os.environ | {name: str(path) for name, path in folders.items()}
    if args.python:
        (folder / kind / "bench").symlink_to(ROOT / "bench")
        environment |= {"LOGITS_PYTHON": args.python, "PYTHONPATH": str(folder / kind)}
        # emulated processors are slow, and more so where threads wait for each other by spinning
        environment |= {"LOGITS_TIMEOUT_S": "3600", "LOGITS_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        TESTS,
        *(["-k", args.select] if args.select else []),
    ]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind}: {(done.stdout + done.stderr)[-3000:]}")
    return re.findall(r"\d+ passed.*(?= in )", done.stdout)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("stock", type=Path)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--python")
    parser.add_argument("--select")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        zipfile.ZipFile(args.wheel).extractall(folder)
        libraries = Path(folder) / "pyhobbit/lib"
        names = sorted(path.stem.removeprefix(PREFIX) for path in libraries.glob(f"{PREFIX}*.so"))
        for kind in args.kinds or names:
            said = compare(kind, libraries, args.stock.resolve(), args, Path(folder))
            print(f"| {kind} | {said} |", flush=True)


if __name__ == "__main__":
    main()
