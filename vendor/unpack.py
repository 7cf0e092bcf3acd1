# SPDX-License-Identifier: MIT
"""Unpack the llama.cpp sources that a lock file pins, and apply our patches.

The sources are a folder of a source distribution on PyPI. vendor/NAME.lock is unpacked to vendor/NAME. The
tree appears complete and patched or not at all, and a second run with the same lock and patches does nothing.
When lock or patches have changed, only files whose contents differ are written, so that a build tree beside
it stays valid.
"""

import argparse
import filecmp
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

VENDOR = Path(__file__).resolve().parent
LOCK = VENDOR / "llama.cpp.lock"
PATCHES = VENDOR.parent / "patches"
CACHE = VENDOR / ".sdist"
STAMP = ".pyhobbit-stamp"


class UnpackError(Exception):
    """A failure that the user can act on; the message is one sentence."""


class Lock(NamedTuple):
    """The pinned source distribution, and the folder in it that holds llama.cpp."""

    package: str
    version: str
    sha256: str
    tree: str
    upstream_commit: str


def read_lock(path: Path) -> Lock:
    """Parse `key = value` lines. Raises UnpackError when they are others than those of a lock."""
    values = dict(re.findall(r"^(\w+) *= *(\S+)$", path.read_text(), re.MULTILINE))
    if values.keys() != {*Lock._fields}:
        raise UnpackError(f"{path.name} must set exactly {', '.join(sorted(Lock._fields))}")
    return Lock(**values)


def stamp_of(lock: Path, patches: list[Path]) -> str:
    """Hash of everything that the unpacked tree is made from."""
    digest = hashlib.sha256(lock.read_bytes())
    for patch in patches:
        digest.update(patch.name.encode() + b"\0" + patch.read_bytes())
    return digest.hexdigest()


def verify(sdist: Path, lock: Lock) -> None:
    """Raises UnpackError unless the file has the pinned checksum."""
    try:
        found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    except OSError as error:
        raise UnpackError(f"cannot read {sdist}: {error.strerror}") from error
    if found != lock.sha256:
        raise UnpackError(f"{sdist} has sha256 {found}, expected {lock.sha256}: delete it and fetch it again")


def fetch(lock: Lock) -> Path:
    """The verified source distribution, downloaded with pip unless the cache has it."""
    cached = CACHE / f"{lock.sha256}.tar.gz"
    if cached.exists():
        verify(cached, lock)
        return cached
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", lock.package]
        # stdout belongs to our caller, which reads the path that --print-sdist writes
        wanted = f"{lock.package}=={lock.version}"
        done = subprocess.run([*pip, "--dest", folder, wanted], stdout=sys.stderr)
        found = list(Path(folder).glob("*.tar.gz"))
        if done.returncode != 0 or len(found) != 1:
            raise UnpackError(f"pip could not download {wanted}: check the network, or give it with --sdist")
        verify(found[0], lock)
        found[0].replace(cached)
    return cached


def extract(sdist: Path, tree: str, folder: Path) -> None:
    """Write the files below */`tree`/ to `folder`, dated now so that builds notice them."""
    folder.mkdir()
    depth = 1 + len(PurePosixPath(tree).parts)
    # .git: a link to a submodule's repository, which the distribution does not hold
    options = ["--touch", "--exclude=.git", "--wildcards", "--no-wildcards-match-slash"]
    command = ["tar", "-xf", str(sdist), "-C", str(folder), *options, f"--strip-components={depth}"]
    done = subprocess.run([*command, f"*/{tree}"], capture_output=True, text=True)
    if done.returncode != 0 or not (folder / "CMakeLists.txt").exists():
        raise UnpackError(f"{sdist.name} has no whole {tree}: {' '.join(done.stderr.split())}")


def apply(patch: Path, tree: Path) -> None:
    """Raises UnpackError, with git's reason, when the patch does not apply exactly."""
    # below the ceiling git sees no repository: inside one, it silently skips ignored folders
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    command = ["git", "apply", "-p1", "--whitespace=nowarn", str(patch.resolve())]
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UnpackError("applying patches needs git: install it") from error
    if done.returncode != 0:
        raise UnpackError(f"patch {patch.name} does not apply: {' '.join(done.stderr.split())}")


def files_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()}


def sync(new: Path, old: Path) -> int:
    """Make `old` equal to `new`, touching only what differs; returns the number of files changed."""
    wanted = files_below(new)
    extra = files_below(old) - wanted
    for name in extra:
        (old / name).unlink()
    _, differing, absent = filecmp.cmpfiles(new, old, wanted, shallow=False)
    changed = [*differing, *absent]
    for name in changed:
        (old / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).replace(old / name)
    return len(extra) + len(changed)


def unpack(lock_file: Path, tree: Path, sdist: Path | None, patches: list[Path]) -> str:
    """Bring `tree` to the pinned sources with `patches` applied; returns a line that says what was done."""
    lock, stamp = read_lock(lock_file), stamp_of(lock_file, patches)
    stamp_file = tree / STAMP
    if stamp_file.exists() and stamp_file.read_text() == stamp:
        return f"{tree} is up to date"
    archive = sdist or fetch(lock)
    verify(archive, lock)
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent, prefix=".unpack-") as folder:
        new = Path(folder) / "tree"
        extract(archive, lock.tree, new)
        for patch in patches:
            apply(patch, new)
        if tree.exists():
            # an interrupted sync must not pass for a finished one
            stamp_file.unlink(missing_ok=True)
            done = f"{tree}: {sync(new, tree)} files changed"
        else:
            new.rename(tree)
            done = f"{tree}: unpacked"
        stamp_file.write_text(stamp)
    return f"{done}, {len(patches)} patches applied"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lock", type=Path, metavar="FILE", default=LOCK, help="lock file of the sources")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help="use this file instead of downloading it")
    parser.add_argument("--stock", type=Path, metavar="DIR", help="unpack to DIR without our patches")
    parser.add_argument("--print-sdist", action="store_true", help="only fetch, verify and print its path")
    args = parser.parse_args()
    try:
        if args.print_sdist:
            print(args.sdist or fetch(read_lock(args.lock)))
        elif args.stock:
            print(unpack(args.lock, args.stock, args.sdist, []))
        else:
            patches = sorted(PATCHES.glob("*.patch"))
            print(unpack(args.lock, VENDOR / args.lock.stem, args.sdist, patches))
    except UnpackError as error:
        print(f"unpack.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
