# SPDX-License-Identifier: MIT
"""Runs llama-cpp-python's own tests, offline, with our libraries and with stock's.

The tiny model takes the place of what they download, and a random hybrid model that of the hybrid one.
Exit status 1 where a test fails with ours and passes with stock. Needs `make build stock` and scipy.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from run import Result, compare, models, run_pytest  # puts tests/ on the path

import random_moe  # isort: skip

PLUGIN = """
import huggingface_hub
def downloaded(repo, file, **options):
    if "mamba" in repo or "bge" in repo:
        import pytest
        pytest.skip("needs a recurrent or embedding model")
    return {hybrid!r} if "Falcon-H1" in repo else {tiny!r}
huggingface_hub.hf_hub_download = downloaded
"""


def unpack(folder: Path) -> None:
    """Writes the tests of the source distribution to folder / tests."""
    printed = subprocess.run(
        [sys.executable, models.ROOT / "vendor/unpack.py", "--print-sdist"],
        capture_output=True,
        text=True,
        check=True,
    )
    with tarfile.open(printed.stdout.strip()) as archive:
        for member in archive:
            path = Path(member.name)
            if path.parts[1:2] == ("tests",) and path.suffix == ".py":
                member.name = str(Path(*path.parts[1:]))
                archive.extract(member, folder, filter="data")


def run_tests(libraries: Path, folder: Path) -> dict[str, Result]:
    environment = {
        **os.environ,
        "LLAMA_CPP_LIB_PATH": str(libraries),
        "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    options = ["-p", "downloads", "--rootdir", folder, folder / "tests"]
    return run_pytest(options, folder, cwd=models.ROOT, environment=environment)  # reads vendor/llama.cpp


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="name the tests that fail with both")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pyhobbit-bindings-") as name:
        folder = Path(name)
        unpack(folder)
        hybrid = folder / "hybrid.gguf"
        random_moe.write_model(random_moe.hybrid(), hybrid, models.stock_dir())
        (folder / "downloads.py").write_text(PLUGIN.format(hybrid=str(hybrid), tiny=str(models.tiny("f16"))))
        stock = run_tests(models.stock_dir(), folder)
        patched = run_tests(models.lib_dir(), folder)
    return compare(stock, patched, verbose=args.verbose)


if __name__ == "__main__":
    sys.exit(main())
