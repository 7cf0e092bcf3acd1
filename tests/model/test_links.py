# SPDX-License-Identifier: MIT
"""Links to the first part of a split model: parts lie beside its target, all else beside the link."""

from pathlib import Path

import models
import pytest
from conftest import RunPyhobbit
from servers import PROMPT, serving

from pyhobbit import Hobbit
from pyhobbit.errors import HobbitError
from pyhobbit.model.model_file import model_parts, read_model_file
from pyhobbit.native.ffi import first_part

ANSWER = ("-p", PROMPT, "-n", 8, "--temp", 0, "--pools", "4M")


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first part of a split model as a cache of downloads has it: links to files without a name."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "blobs").mkdir()
    (folder / "snapshot").mkdir()
    first = models.split(models.tiny)
    for number, part in enumerate(sorted(first.parent.glob(first.name.replace("00001-of", "*-of")))):
        (folder / "blobs" / str(number)).symlink_to(part)
        (folder / "snapshot" / part.name).symlink_to(f"../blobs/{number}")
    return folder / "snapshot" / first.name


@pytest.fixture
def link(cached: Path, tmp_path: Path) -> Path:
    """A link under another name to the link in the cache."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "r.gguf").symlink_to(cached)
    link = tmp_path / "q.gguf"
    link.symlink_to("other/r.gguf")
    return link


def test_parts_are_found_beside_what_the_link_leads_to(cached: Path, link: Path, tmp_path: Path) -> None:
    assert first_part(link) == cached
    parts = model_parts(link)
    assert len(parts) == len(model_parts(cached)) > 1
    namesake = tmp_path / cached.name  # without its second part
    namesake.symlink_to(cached)
    assert first_part(namesake) == cached
    for number in range(2, len(parts) + 1):
        name = cached.name.replace("00001-of", f"{number:05d}-of")
        (tmp_path / name).symlink_to(cached.parent / name)
    assert first_part(namesake) == namesake
    blob = tmp_path / "b.gguf"
    blob.symlink_to(cached.resolve().parent)
    assert first_part(blob) == blob
    assert first_part(tmp_path / "none.gguf") == tmp_path / "none.gguf"


def test_every_verb_follows_the_link(
    cached: Path, link: Path, run_pyhobbit: RunPyhobbit, tmp_path: Path
) -> None:
    expected = run_pyhobbit("chat", cached, *ANSWER)
    assert expected.returncode == 0, expected.stderr
    done = run_pyhobbit("chat", link, *ANSWER)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    whole = run_pyhobbit("chat", link, *ANSWER[:-2])  # without a cache, as stock llama.cpp
    assert (whole.returncode, whole.stdout) == (0, expected.stdout), whole.stderr
    with Hobbit(link, pools="4M", verbose=False) as llm:
        text = llm(PROMPT, max_tokens=8, temperature=0)["choices"][0]["text"]
    assert text.strip() in expected.stdout
    with serving(link, tmp_path / "log", "--pools", "4M") as server:
        assert server.complete(n=8).strip() == text.strip()
    done = run_pyhobbit("inspect", link, "--no-speed")
    assert done.returncode == 0, done.stderr


def test_what_belongs_to_the_model_lies_beside_the_link(
    cached: Path, link: Path, run_pyhobbit: RunPyhobbit
) -> None:
    done = run_pyhobbit("convert", "--low", "q4_0", "--sidecar", link)
    assert done.returncode == 0, done.stderr
    assert link.with_name("q.hobbit.gguf").exists()
    assert [tier.name for tier in read_model_file(link).tiers] == ["high", "low"]
    assert len(read_model_file(cached).tiers) == 1
    assert run_pyhobbit("config", link, "--write", "--set", "t1=0.5", "--set", "t2=0.9").returncode == 0
    assert link.with_name("q.toml").exists()
    done = run_pyhobbit("chat", link, *ANSWER, "--verbose")
    assert done.returncode == 0, done.stderr
    assert "q.toml sets t1, t2" in done.stderr


def test_a_missing_part_is_named(cached: Path, run_pyhobbit: RunPyhobbit, tmp_path: Path) -> None:
    first = tmp_path / cached.name
    first.write_bytes(cached.read_bytes())
    link = tmp_path / "q.gguf"
    link.symlink_to(first.name)
    missing = first.name.replace("00001-of", "00002-of")
    with pytest.raises(HobbitError, match=missing):
        model_parts(link)
    options = {"inspect": ("--no-speed",), "chat": ANSWER, "convert": ("--dry-run",), "serve": ()}
    for verb, some in options.items():
        done = run_pyhobbit(verb, link, *some)
        assert done.returncode == 1
        assert missing in done.stderr
        assert "damaged" not in done.stderr
