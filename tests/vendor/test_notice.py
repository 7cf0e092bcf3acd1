# SPDX-License-Identifier: MIT
"""NOTICE names every work of others in the built package."""

import re
from pathlib import Path

import pytest

from pyhobbit.native import paths

ROOT = Path(__file__).resolve().parents[2]
NOTICE = (ROOT / "NOTICE").read_text("utf-8")
LLAMA = ROOT / "vendor" / "llama.cpp"
# NOTICE's names for the folders of llama.cpp's vendor/
NAMES = {
    "cpp-httplib": "cpp-httplib", "miniaudio": "miniaudio", "nlohmann": "JSON for Modern C++",
    "sheredom": "subprocess.h", "stb": "stb_image", "rotate-bits": "rotate-bits", "sha1": "sha1",
    "sha256": "sha256", "xxhash": "xxHash",
}  # fmt: skip


def test_what_llama_cpp_vendors_is_named() -> None:
    vendor = LLAMA / "vendor"
    folders = {
        each.name for folder in (vendor, vendor / "hash") for each in folder.iterdir() if each.is_dir()
    }
    assert folders - {"hash"} == set(NAMES)
    assert all(f"  {name} " in NOTICE for name in NAMES.values())


def test_installed_licences_are_named_and_named_ones_are_installed() -> None:
    installed = {each.name for each in (paths.LIB_DIR.parent / "licenses").iterdir()}
    named = {word for word in NOTICE.split() if word.startswith("LICENSE-")}
    assert named == installed


@pytest.mark.parametrize("file", re.findall(r"\S+/\S+\.[ch]\w*$", NOTICE, re.MULTILINE))
def test_files_whose_headers_have_the_licence_exist(file: str) -> None:
    text = (LLAMA / file).read_text("utf-8", errors="replace").lower()
    assert any(word in text for word in ("licen", "public domain", "copyright"))
