# SPDX-License-Identifier: MIT
"""A calibration that one machine has made, taken by another."""

import shutil
from pathlib import Path

import fake_hub
import models
import pytest
from conftest import RunPyhobbit

from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.quality.stored import Calibration, fetch, published_name


@pytest.fixture
def calibration(tmp_path: Path) -> bytes:
    return Calibration(1, 1, {}, 0.0, "lru", (1, 0, 0, 0)).write(tmp_path / "other.gguf").read_bytes()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "here" / "m.gguf"
    path.parent.mkdir()
    shutil.copyfile(models.tiny_experts("f16"), path)
    return path


def test_the_name_is_that_of_the_bytes_and_of_the_low_tier(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other name.gguf"
    shutil.copyfile(model, copy)
    name = published_name(model)
    assert published_name(copy) == name
    with copy.open("r+b") as file:  # the first bit of the last tensor
        reader = models.GGUFReader(model)
        file.seek(int(reader.tensors[-1].data_offset))
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert published_name(copy) != name
    sidecar = models.tiny_sidecar("f16", "q4_0").with_name("tiny-f16.hobbit.gguf")
    assert published_name(model, sidecar) != name


@pytest.mark.parametrize("is_url", [False, True])
def test_a_calibration_is_found_by_its_name(
    model: Path, calibration: bytes, tmp_path: Path, run_pyhobbit: RunPyhobbit, is_url: bool
) -> None:
    folder = tmp_path / "all of them"
    folder.mkdir()
    (folder / published_name(model)).write_bytes(calibration)
    done = run_pyhobbit("calibrate", model, "--fetch", f"{folder.as_uri()}/" if is_url else folder)
    assert done.returncode == 0, done.stderr
    assert calibration_path(model).read_bytes() == calibration


def test_there_is_one_source(model: Path, run_pyhobbit: RunPyhobbit) -> None:
    for options in ((), ("--text", model, "--fetch", "here")):
        done = run_pyhobbit("calibrate", model, *options)
        assert done.returncode == 2
        assert "give --text FILE to calibrate on, or --fetch PLACE" in done.stderr


def test_what_is_missing_or_something_else_changes_nothing(
    model: Path, calibration: bytes, tmp_path: Path
) -> None:
    mine = calibration_path(model)
    mine.write_bytes(b"mine")
    name = published_name(model)
    with pytest.raises(
        HobbitError, match=f"{name}, this model's calibration, cannot be fetched from {tmp_path}"
    ):
        fetch(model, str(tmp_path))
    for found in (b"<html>Log in</html>", calibration[:-1]):
        (tmp_path / name).write_bytes(found)
        with pytest.raises(HobbitError, match="does not answer with a whole calibration"):
            fetch(model, str(tmp_path))
    hub = fake_hub.Hub({"a/b": {name: calibration}}, endless=(name,))
    with fake_hub.serving(hub), pytest.raises(HobbitError, match="a whole calibration, of at most 8 MiB"):
        fetch(model, f"{hub.endpoint}/a/b/resolve/main")
    for place in ("http://127.0.0.1:9/x", "no scheme://x", "http://", "http://a:b"):
        with pytest.raises(HobbitError, match="cannot be fetched"):
            fetch(model, place)
    assert mine.read_bytes() == b"mine"
