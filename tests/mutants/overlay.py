# SPDX-License-Identifier: MIT
"""One mutant: a file with a change, what is built of it, and the tests that must fail.

The changed file covers the original in a mount namespace of the compiler and of the tests, and so does a
library that is linked with it. So nothing in the tree or in the environment changes, whatever ends the run.
Needs the build of `make build`, and the right to mount (root, or user namespaces).
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/release"
TEST_TIMEOUT_S = 300
UNSHARE = ["unshare", "--mount"] + ([] if os.geteuid() == 0 else ["--map-root-user"])
ENVIRONMENT = {
    **os.environ,
    "PYTHONDONTWRITEBYTECODE": "1",
    "CCACHE_DISABLE": "1",
    "OMP_WAIT_POLICY": "passive",
}


@dataclass(frozen=True)
class Mutant:
    """A change in a file, by a text that it has once or by place.

    library: what is linked anew for pytest, of build/release/bin; "" for Python and for test programs.
    tests: names of C++ test programs, or arguments of pytest (they have a dot).
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    library: str = ""
    offset: int = -1

    def text(self) -> str:
        whole = (ROOT / self.file).read_text(encoding="utf-8")
        if self.offset < 0 and whole.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {whole.count(self.old)} times {self.old!r}")
        at = self.offset if self.offset >= 0 else whole.index(self.old)
        assert whole.startswith(self.old, at)
        return whole[:at] + self.new + whole[at + len(self.old) :]


class BuildError(Exception):
    """A changed file does not compile."""


def covered(
    covers: dict[Path, Path], command: list[str], cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Runs a command for which covers' files stand in the place of others."""
    mounts = "".join('mount --bind "$1" "$2" && shift 2 && ' for _ in covers)
    files = [str(path) for original, cover in covers.items() for path in (cover, original)]
    shell = [*UNSHARE, "sh", "-c", f'{mounts}exec "$@"', "sh", *files, *command]
    return subprocess.run(
        shell, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=TEST_TIMEOUT_S
    )


def fails(mutant: Mutant, folder: Path) -> str:
    """The first test that fails with it, "" if it survives. Raises BuildError."""
    original = ROOT / mutant.file
    changed = folder / original.name
    changed.write_text(mutant.text(), encoding="utf-8")
    covers = {original: changed}
    compiled: dict[str, Path] = {}
    if original.suffix == ".cpp":
        compiled = _compile(original, covers, folder)
        covers = {}
    if mutant.library:
        assert compiled
        covers = {_installed(mutant.library): link(f"bin/{mutant.library}", compiled, folder)}
    for test in mutant.tests:
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
        if "." not in test:
            program = link(f"bin/{test}", compiled, folder) if compiled else BUILD / "bin" / test
            command = [str(program)]
        try:
            if covered(covers, command).returncode != 0:
                return test
        except subprocess.TimeoutExpired:
            return f"{test} (no end)"
    return ""


@functools.cache
def _commands() -> dict[Path, str]:
    """Compile commands of each source."""
    done = subprocess.run(
        ["ninja", "-C", str(BUILD), "-t", "compdb"], capture_output=True, text=True, check=True
    )
    entries = json.loads(done.stdout)
    return {
        (BUILD / entry["file"]).resolve(): entry["command"] for entry in entries if " -c " in entry["command"]
    }


def compile_command(source: Path) -> tuple[str, str]:
    """The command and its object; of the unity file where the build compiles several files as one."""
    commands = _commands()
    if source not in commands:
        name = source.relative_to(ROOT).as_posix()
        source = next(file for file in commands if "Unity" in file.parts and name in file.read_text())
    found = re.search(r" -o (\S+)", commands[source])
    assert found
    return commands[source], found[1]


def _compile(source: Path, covers: dict[Path, Path], folder: Path) -> dict[str, Path]:
    """The mutant's object by the name of the build's."""
    command, object_ = compile_command(source)
    path = folder / "mutant.o"
    shell = f"{command.replace(f' -o {object_} ', f' -o {path} ')} -O1 -w -D_GLIBCXX_ASSERTIONS"
    done = covered(covers, ["sh", "-c", f"cd {BUILD} && {shell}"])
    if done.returncode != 0:
        raise BuildError(done.stderr)
    return {object_: path}


@functools.cache
def _link_command(target: str) -> str:
    command = ["ninja", "-C", str(BUILD), "-t", "commands", "-s", target]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.removeprefix(": && ").strip().removesuffix(" && :")


def build(command: str) -> None:
    """Runs a command in the build's folder. Raises BuildError."""
    done = subprocess.run(["sh", "-c", command], cwd=BUILD, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(done.stderr)


def link(target: str, objects: dict[str, Path], folder: Path) -> Path:
    """A library or program with other files in the place of the build's objects. Raises BuildError."""
    path = folder / Path(target).name
    command = _link_command(target)
    for object_, changed in objects.items():
        command = command.replace(f" {object_} ", f" {changed} ")
    if command == _link_command(target):  # they are of an archive; symbols are then known before
        files = " ".join(map(str, objects.values()))
        command = command.replace(f" -o {target} ", f" -o {target} {files} ")
    command = command.replace(f" -o {target} ", f" -o {path} ")
    if target.endswith(".so"):  # installed, libraries find each other beside themselves
        command = command.replace(f"-Wl,-rpath,{BUILD}/bin:", "-Wl,-rpath,'$ORIGIN'")
    build(command)
    return path


def _installed(library: str) -> Path:
    command = [sys.executable, "-P", "-c", "from pyhobbit.native.paths import LIB_DIR; print(LIB_DIR)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()) / library
