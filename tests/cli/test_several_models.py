# SPDX-License-Identifier: MIT
"""The models of a folder: no companions, and a reason for each file that cannot be one."""

import random
from pathlib import Path

import models
import pytest
import random_moe

from pyhobbit.cli import several_models
from pyhobbit.cli.main import main
from pyhobbit.cli.several_models import find_models, preset_file
from pyhobbit.errors import HobbitError
from pyhobbit.model import downloaded
from pyhobbit.model.downloaded import LocalModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    random_moe.write_model(random_moe.declare("olmoe"), path, models.lib_dir())
    return path


def test_companions_and_later_parts_are_no_models(model: Path, tmp_path: Path) -> None:
    names = ["qwen3.gguf", "qwen3.hobbit.gguf", "qwen3.calibration.gguf", "qwen3.imatrix.gguf"]
    names += ["mmproj-F16.gguf", "eagle3-qwen3.gguf", "b/model.gguf", "b/mmproj.gguf", "c/x.gguf", "c/y.gguf"]
    random.shuffle(names)  # the file system's order follows that of making
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if "mmproj" in name or "imatrix" in name:
            (tmp_path / name).write_bytes(b"GGUF")
        else:
            (tmp_path / name).symlink_to(model)
    presets, problems = find_models(tmp_path)
    assert list(presets) == ["model", "x", "y", "qwen3"]
    assert problems == []
    assert presets["model"]["mmproj"] == str(tmp_path / "b/mmproj.gguf")
    assert presets["qwen3"] == {"model": str(tmp_path / "qwen3.gguf"), "alias": "qwen3-exact"}


def test_each_file_that_cannot_be_a_model_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:-100])
    (tmp_path / "text.gguf").write_text("text")
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "gone.gguf").symlink_to("nowhere")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "a-00002-of-00002.gguf").symlink_to(model)
    (tmp_path / "a#1.gguf").symlink_to(model)
    (tmp_path / "twice").mkdir()
    for name in ("m.gguf", "twice/m.gguf", "twice/n.gguf"):
        (tmp_path / name).symlink_to(model)
    presets, problems = find_models(tmp_path)
    assert set(presets) == {"m", "n"}
    for name, reason in (
        ("cut.gguf", "truncated"),
        ("text.gguf", "not a GGUF file"),
        ("empty.gguf", "is empty"),
        ("gone.gguf", "a link to a file that is gone"),
        ("folder.gguf", "is a folder"),
        ("a-00002-of-00002.gguf", "first part is missing"),
        ("a#1.gguf", "rename it"),
        ("m.gguf", "the name of another model"),
    ):
        assert any(name in each and reason in each for each in problems), name
    assert len(problems) == 8


def test_the_second_name_yields_to_a_model(model: Path, tmp_path: Path) -> None:
    for name in ("m.gguf", "m-exact.gguf"):
        (tmp_path / name).symlink_to(model)
    presets, _ = find_models(tmp_path)
    assert "alias" not in presets["m"]
    text = Path(preset_file(presets)).read_text()
    assert text.splitlines()[:2] == ["[m-exact]", f"model = {tmp_path / 'm-exact.gguf'}"]


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HobbitError, match="is not a folder"):
        find_models(tmp_path / "none")


def test_all_downloads_are_served_by_their_names(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    local = [LocalModel("a/b:Q4_0", model, 1, 0.0), LocalModel("qwen3:30b", model, 1, 0.0, "ollama")]
    monkeypatch.setattr(downloaded, "downloaded_models", lambda: local[:1])
    monkeypatch.setattr(downloaded, "models_of_programs", lambda: local[1:])
    option, file = several_models.all_downloads()
    assert option == "--models-preset"
    lines = Path(file).read_text().splitlines()
    assert lines[:3] == ["[a/b:Q4_0]", f"model = {model}", "alias = a/b:Q4_0-exact"]
    assert lines[3] == "[qwen3:30b]"
    assert capsys.readouterr().err == "pyhobbit: names     a/b:Q4_0, qwen3:30b\n"
    assert several_models.rows(None, None, [option, file])["models"].startswith("those of pyhobbit list, ")
    local.clear()
    assert several_models.all_downloads() == []


def test_a_folder_without_models_is_refused_before_anything_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--models-dir", str(tmp_path), "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"pyhobbit: error: {tmp_path} holds no model; without --models-dir, serve has")
    assert said.count("\n") == 1
