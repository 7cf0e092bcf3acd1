# SPDX-License-Identifier: MIT
"""vendor/unpack.py, run as the build runs it, on a small source distribution made here."""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

UNPACK = Path(__file__).parents[2] / "vendor" / "unpack.py"

FILES = {"CMakeLists.txt": "project(fake)\n", "src/a.cpp": "int a = 1;\n", "src/b.cpp": "int b = 1;\n"}
CHANGE_A = """Makes a two.

diff --git a/src/a.cpp b/src/a.cpp
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -1 +1 @@
-int a = 1;
+int a = 2;
"""


@dataclass(frozen=True)
class Checkout:
    """A checkout with nothing but what unpack.py needs; its sdist holds FILES."""

    root: Path
    sdist: Path

    @property
    def tree(self) -> Path:
        return self.root / "vendor" / "llama.cpp"

    def lock(self, name: str = "llama.cpp", tree: str = "vendor/llama.cpp") -> Path:
        """Writes a lock file that pins the sdist as it is now."""
        digest = hashlib.sha256(self.sdist.read_bytes()).hexdigest()
        path = self.root / "vendor" / f"{name}.lock"
        pin = f"package = fake\nversion = 1.0\nsha256 = {digest}\ntree = {tree}\nupstream_commit = abc\n"
        path.write_text(f"# pin\n{pin}")
        return path

    def patch(self, name: str, text: str) -> None:
        (self.root / "patches" / name).write_text(text)

    def unpack(self, *options: str) -> subprocess.CompletedProcess[str]:
        script = [sys.executable, str(self.root / "vendor" / "unpack.py"), "--sdist", str(self.sdist)]
        return subprocess.run([*script, *options], capture_output=True, text=True)

    def failure(self, *options: str) -> str:
        """The single line that a failing run writes."""
        done = self.unpack(*options)
        assert done.returncode == 1
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        return done.stderr

    def unpacked(self, *options: str) -> str:
        done = self.unpack(*options)
        assert done.returncode == 0, done.stderr
        return done.stdout


def write_sdist(path: Path, files: dict[str, str]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "checkout"
    (root / "vendor").mkdir(parents=True)
    (root / "patches").mkdir()
    # as in a real checkout: unpack.py must not be confused by the repository around it
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    (root / ".gitignore").write_text("/vendor/llama.cpp/\n")
    shutil.copy(UNPACK, root / "vendor")
    sdist = tmp_path / "fake-1.0.tar.gz"
    write_sdist(sdist, {f"fake-1.0/vendor/llama.cpp/{name}": text for name, text in FILES.items()})
    checkout = Checkout(root, sdist)
    checkout.lock()
    return checkout


def times(tree: Path) -> dict[str, int]:
    return {str(p.relative_to(tree)): p.stat().st_mtime_ns for p in tree.rglob("*") if p.is_file()}


def test_unpacks_the_vendored_folder_only(checkout: Checkout) -> None:
    checkout.unpacked()
    assert set(times(checkout.tree)) - {".pyhobbit-stamp"} == set(FILES)
    assert {name: (checkout.tree / name).read_text() for name in FILES} == FILES


def test_wrong_checksum_is_refused(checkout: Checkout) -> None:
    with checkout.sdist.open("ab") as file:
        file.write(b"x")
    assert "sha256" in checkout.failure()
    assert not checkout.tree.exists()


def test_missing_sdist_is_named(checkout: Checkout) -> None:
    checkout.sdist.unlink()
    assert str(checkout.sdist) in checkout.failure()


def test_incomplete_lock_is_refused(checkout: Checkout) -> None:
    (checkout.root / "vendor" / "llama.cpp.lock").write_text("package = fake\nversion = 1.0\n")
    assert "sha256" in checkout.failure()


def test_member_that_leaves_the_tree_is_refused(checkout: Checkout) -> None:
    write_sdist(checkout.sdist, {"fake-1.0/vendor/llama.cpp/../../../evil": "x"})
    checkout.lock()
    assert "evil" in checkout.failure()
    assert not list(checkout.root.rglob("evil"))


def test_patches_apply_in_the_order_of_their_names(checkout: Checkout) -> None:
    checkout.patch("0002-b.patch", CHANGE_A.replace("a = 2", "a = 3").replace("a = 1", "a = 2"))
    checkout.patch("0001-a.patch", CHANGE_A)
    checkout.unpacked()
    assert (checkout.tree / "src/a.cpp").read_text() == "int a = 3;\n"


def test_patch_that_does_not_apply_is_named_and_leaves_no_tree(checkout: Checkout) -> None:
    checkout.patch("0001-good.patch", CHANGE_A)
    checkout.patch("0002-bad.patch", CHANGE_A)
    message = checkout.failure()
    assert "0002-bad.patch" in message
    assert "0001-good.patch" not in message
    left = {path.name for path in (checkout.root / "vendor").iterdir()}
    assert left == {"unpack.py", "llama.cpp.lock"}


def test_second_run_changes_nothing(checkout: Checkout) -> None:
    checkout.patch("0001-a.patch", CHANGE_A)
    checkout.unpacked()
    before = times(checkout.tree)
    checkout.sdist.unlink()
    assert "up to date" in checkout.unpacked()
    assert times(checkout.tree) == before


@pytest.mark.parametrize("first", [True, False], ids=["added", "removed"])
def test_changed_patches_touch_only_the_files_that_differ(checkout: Checkout, first: bool) -> None:
    patch = checkout.root / "patches" / "0001-a.patch"
    if not first:
        patch.write_text(CHANGE_A)
    checkout.unpacked()
    before = times(checkout.tree)
    if first:
        patch.write_text(CHANGE_A)
    else:
        patch.unlink()
    checkout.unpacked()
    after = times(checkout.tree)
    assert {name for name in FILES if after[name] != before[name]} == {"src/a.cpp"}
    assert after["src/a.cpp"] > before["src/a.cpp"]
    assert (checkout.tree / "src/a.cpp").read_text() == f"int a = {2 if first else 1};\n"


def test_file_that_a_removed_patch_added_goes_away(checkout: Checkout) -> None:
    added = "--- /dev/null\n+++ b/src/new.cpp\n@@ -0,0 +1 @@\n+int n;\n"
    checkout.patch("0001-new.patch", added)
    checkout.unpacked()
    assert (checkout.tree / "src/new.cpp").exists()
    (checkout.root / "patches" / "0001-new.patch").unlink()
    checkout.unpacked()
    assert not (checkout.tree / "src/new.cpp").exists()


def test_stock_tree_has_no_patches(checkout: Checkout) -> None:
    checkout.patch("0001-a.patch", CHANGE_A)
    stock = checkout.root / "build" / "stock"
    checkout.unpacked("--stock", str(stock))
    assert (stock / "src/a.cpp").read_text() == FILES["src/a.cpp"]
    assert not checkout.tree.exists()


def test_a_lock_names_the_tree_inside_its_package(checkout: Checkout) -> None:
    files = {"fake-1.0/thirdparty/llama.cpp/" + name: text for name, text in FILES.items()}
    write_sdist(checkout.sdist, {**files, "fake-1.0/thirdparty/other.cpp": "int other;\n"})
    checkout.patch("0001-a.patch", CHANGE_A)
    newer = checkout.lock("llama.cpp-newer", "thirdparty/llama.cpp")
    checkout.unpacked("--lock", str(newer))
    tree = checkout.root / "vendor" / "llama.cpp-newer"
    assert set(times(tree)) - {".pyhobbit-stamp"} == set(FILES)
    assert (tree / "src/a.cpp").read_text() == "int a = 2;\n"
    stock = checkout.root / "build" / "stock-newer"
    checkout.unpacked("--lock", str(newer), "--stock", str(stock))
    assert (stock / "src/a.cpp").read_text() == FILES["src/a.cpp"]
    assert not checkout.tree.exists()


def test_a_package_without_the_tree_is_refused(checkout: Checkout) -> None:
    checkout.lock(tree="thirdparty/llama.cpp")
    assert "fake-1.0.tar.gz has no whole thirdparty/llama.cpp: " in checkout.failure()
    assert not checkout.tree.exists()
