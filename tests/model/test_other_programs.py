# SPDX-License-Identifier: MIT
"""Models in the folders of ollama and LM Studio."""

import argparse
import json
from pathlib import Path

import models
import pytest

from pyhobbit.cli.main import main
from pyhobbit.model import other_programs
from pyhobbit.model.model_path import add_model_arguments, check_model_arguments

STUDIO = "lmstudio-community/Tiny-GGUF/Tiny-Q8_0.gguf"
OLLAMA = ("tiny:latest", "tiny:8x", "someone/tiny:q4", "hf.co/user/Tiny-GGUF:Q8_0")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path) -> Path:
    """A home with the tiny model in both programs' folders, a dense one, and files that are no models."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("OLLAMA_MODELS", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    studio, blobs = tmp_path / ".lmstudio/models" / STUDIO, tmp_path / ".ollama/models/blobs"
    studio.parent.mkdir(parents=True)
    blobs.mkdir(parents=True)
    studio.symlink_to(tiny_gguf)
    models.write_dense_llama(studio.with_name("dense.gguf"))
    (studio.parent / "broken.gguf").write_bytes(b"GGUF")
    (blobs / "sha256-12ab").symlink_to(tiny_gguf)
    for name in OLLAMA:
        *above, last = name.split("/")
        above = above if len(above) > 1 else ["registry.ollama.ai", *(above or ["library"])]
        manifest = tmp_path / ".ollama/models/manifests" / "/".join(above) / last.replace(":", "/")
        manifest.parent.mkdir(parents=True, exist_ok=True)
        layers = [
            {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00"},
            {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:12ab"},
        ]
        manifest.write_text(json.dumps({"layers": layers}))
    gone = {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:99"}]}
    (manifest.parent / "gone").write_text(json.dumps(gone))
    (manifest.parent / "damaged").write_text("[]")
    return tmp_path


def test_they_are_listed_by_the_names_of_these_programs(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "--json"]) == 0
    found = {each["name"]: each["program"] for each in json.loads(capsys.readouterr().out)}
    assert found == {STUDIO: "LM Studio", **dict.fromkeys(OLLAMA, "ollama")}


@pytest.mark.parametrize("name", [STUDIO, *OLLAMA, "tiny"])
def test_a_name_opens_the_file_without_a_copy(name: str, home: Path, tiny_gguf: Path) -> None:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    args = parser.parse_args([name])
    check_model_arguments(args)
    assert args.hf_repo is None
    assert args.model.resolve() == tiny_gguf.resolve()
    assert args.model.name.endswith(".gguf")
    if name != STUDIO:
        assert args.model.parent == home / ".local/share/pyhobbit/ollama"
    assert other_programs.find(name) == args.model  # the link is there already


def test_a_new_version_of_a_model_is_followed(home: Path) -> None:
    link = other_programs.find("tiny:8x")
    assert link is not None
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/tiny/8x"
    (home / ".ollama/models/blobs/sha256-34cd").write_bytes(b"GGUF")
    manifest.write_text(manifest.read_text().replace("12ab", "34cd"))
    assert other_programs.find("tiny:8x") == link
    assert link.read_bytes() == b"GGUF"


@pytest.mark.parametrize(
    "name", ["tiny:none", "user/Tiny-GGUF", "../tiny", "", "a/b/c/d:e", "tiny\0", "someone/tiny"]
)
def test_other_names_are_not_theirs(name: str, home: Path) -> None:
    assert other_programs.find(name) is None


@pytest.mark.parametrize("name", ["qwen3:30b", "qwen3"])
def test_a_name_that_nobody_has_says_where_to_look(
    name: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", name]) == 1
    assert f"{name} does not exist; pyhobbit list shows models, and on Hugging" in capsys.readouterr().err
