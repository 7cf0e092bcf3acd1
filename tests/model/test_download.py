# SPDX-License-Identifier: MIT
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL
from fake_hub import Hub, at, gguf, serving
from huggingface_hub import hf_hub_download

from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model import download
from pyhobbit.model.download import fetch

BIG = gguf("big") + os.urandom(12 << 20)

REPOS = {
    "user/many": {
        "README.md": b"text",
        "Model-Q8_0.gguf": gguf("q8"),
        "Model-q4_k_m.gguf": gguf("q4"),
        "Model-UD-IQ2_XXS.gguf": gguf("iq2"),
        "mmproj-F16.gguf": gguf("mmproj"),
        "imatrix.gguf": gguf("imatrix"),
    },
    "user/split": {
        "Q6_K/Model-Q6_K-00002-of-00003.gguf": gguf("2"),
        "Q6_K/Model-Q6_K-00003-of-00003.gguf": gguf("3"),
        "Q6_K/Model-Q6_K-00001-of-00003.gguf": gguf("1"),
    },
    "user/torn": {"Model-Q4_0-00001-of-00002.gguf": gguf("1")},
    "user/big": {"Big.gguf": BIG},
    "user/checkpoint": {
        "config.json": b"{}",
        "tokenizer.model": b"t",
        "model-00001-of-00002.safetensors": b"a",
        "model-00002-of-00002.safetensors": b"b",
        "consolidated.00.safetensors": b"ab again",
        "pytorch_model.bin": b"ab once more",
        "modeling_custom.py": b"code",
        "original/consolidated.pth": b"ab",
    },
    "user/both": {"config.json": b"{}", "model.safetensors": b"a", "Model-Q4_0.gguf": gguf("q4_0")},
    "user/tiers": {
        "a/Model-Q4_0.gguf": gguf("q4_0"),
        "a/Model-Q4_0.hobbit.gguf": gguf("low"),
        "a/Model-Q4_0.calibration.gguf": gguf("keys"),
        "a/Model-Q8_0.calibration.gguf": gguf("other keys"),
    },
    "user/empty": {"README.md": b"text"},
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub(REPOS, {"user/gated": "GatedRepo"})) as hub:
        yield hub


def _fetch(hub: Hub, cache: Path, name: str, checkpoint: bool = False) -> Path:
    with at(hub.endpoint):
        return fetch(name, checkpoint, cache=cache)


def _error(hub: Hub, cache: Path, name: str, checkpoint: bool = False) -> str:
    with pytest.raises(HobbitError) as error:
        _fetch(hub, cache, name, checkpoint)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("user/many", gguf("q4")),  # Q4_K_M
        ("user/many:q8_0", gguf("q8")),
        ("user/many:Iq2_xxs", gguf("iq2")),
        ("user/both", gguf("q4_0")),  # neither Q4_K_M nor Q8_0: the first
    ],
)
def test_the_quant_picks_the_file(hub: Hub, tmp_path: Path, name: str, content: bytes) -> None:
    assert _fetch(hub, tmp_path, name).read_bytes() == content
    assert len(hub.served) == 1


def test_all_parts_of_a_split_model_are_fetched(hub: Hub, tmp_path: Path) -> None:
    path = _fetch(hub, tmp_path, "user/split:Q6_K")
    assert path.name == "Model-Q6_K-00001-of-00003.gguf"
    parts = sorted(path.parent.iterdir())
    assert [part.read_bytes() for part in parts] == [gguf("1"), gguf("2"), gguf("3")]


def test_a_file_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    first = _fetch(hub, tmp_path, "user/many")
    assert _fetch(hub, tmp_path, "user/many") == first
    assert len(hub.served) == 1


def test_a_download_that_broke_off_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.break_after["Big.gguf"] = 10 << 20
    assert _fetch(hub, tmp_path, "user/big").read_bytes() == BIG
    (_, start), (_, again) = hub.served
    assert start == 0
    assert again > 0


def test_files_that_an_interrupted_download_has_finished_are_kept(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(repo: str, file: str, **keys: Any) -> str:
        if "00003-of" in file:
            raise KeyboardInterrupt
        return hf_hub_download(repo, file, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(download, "hf_hub_download", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _fetch(hub, tmp_path, "user/split")
    hub.served.clear()
    path = _fetch(hub, tmp_path, "user/split")
    assert hub.served == [("Q6_K/Model-Q6_K-00003-of-00003.gguf", 0)]
    assert len(list(path.parent.iterdir())) == 3


def test_without_a_network_what_is_there_is_taken(hub: Hub, tmp_path: Path) -> None:
    there = _fetch(hub, tmp_path, "user/many:Q8_0")
    folder = _fetch(hub, tmp_path, "user/checkpoint", checkpoint=True)
    away = Hub({}, endpoint="http://127.0.0.1:9")
    assert _fetch(away, tmp_path, "user/many:Q8_0") == there
    assert _fetch(away, tmp_path, "user/checkpoint", checkpoint=True) == folder
    for name in ("user/many:Q4_K_M", "user/split"):
        error = _error(away, tmp_path, name)
        assert "127.0.0.1:9 cannot be reached" in error
        assert "check the network" in error


def test_a_checkpoint_is_fetched_once_and_without_code(hub: Hub, tmp_path: Path) -> None:
    folder = _fetch(hub, tmp_path, "user/checkpoint", checkpoint=True)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.model",
    ]


def test_a_conversion_takes_the_gguf_where_it_is_asked_for_or_alone(hub: Hub, tmp_path: Path) -> None:
    assert _fetch(hub, tmp_path, "user/both", checkpoint=True).is_dir()
    assert _fetch(hub, tmp_path, "user/both:Q4_0", checkpoint=True).name == "Model-Q4_0.gguf"
    assert _fetch(hub, tmp_path, "user/many", checkpoint=True).name == "Model-q4_k_m.gguf"


def test_what_is_not_there_is_said(hub: Hub, tmp_path: Path) -> None:
    assert "has no Q5_K_M; it has Q8_0, UD-IQ2_XXS, q4_k_m" in _error(hub, tmp_path, "user/many:Q5_K_M")
    assert "pyhobbit convert -hf user/checkpoint" in _error(hub, tmp_path, "user/checkpoint")
    assert "holds no model" in _error(hub, tmp_path, "user/empty")
    assert "holds no model" in _error(hub, tmp_path, "user/empty", checkpoint=True)
    assert "lacks Model-Q4_0-00002-of-00002.gguf" in _error(hub, tmp_path, "user/torn")
    assert "hf auth login" in _error(hub, tmp_path, "user/nothing")
    assert "is gated: accept its conditions on" in _error(hub, tmp_path, "user/gated")


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>log in first</html>",
        b"[]",
        b"null",
        b'{"id": "user/many", "siblings": 3}',
        b'{"id": "user/many", "siblings": [{}]}',
        b'{"id": "user/many", "siblings": [{"rfilename": "../Model-Q8_0.gguf"}]}',
        b"[" * 100_000,
    ],
)
def test_a_network_that_answers_in_the_hubs_place_is_said(tmp_path: Path, answer: bytes) -> None:
    with serving(Hub(REPOS, answers={"user/many": answer})) as hub, pytest.raises(HobbitError) as error:
        _fetch(hub, tmp_path / "cache", "user/many:q8_0")
    assert "does not answer as Hugging Face does" in str(error.value) or "has no" in str(error.value)


@pytest.mark.parametrize("name", ["model", "a/b/c", "/x", "a/", "a/b:c:d", "a b/c"])
def test_a_wrong_name_is_wrong_usage(hub: Hub, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a repository"):
        _fetch(hub, tmp_path, name)
    assert hub.served == []


def test_a_download_ends_where_more_comes_than_was_announced(tmp_path: Path) -> None:
    with (
        serving(Hub({"u/m": {"Big.gguf": gguf("big").ljust(100_000)}}, endless=("Big.gguf",))) as hub,
        pytest.raises(HobbitError, match=r"the download of Big\.gguf does not end at its 97\.7 KiB"),
    ):
        _fetch(hub, tmp_path, "u/m")


def test_a_disk_that_is_too_small_is_found_before_the_download(tmp_path: Path) -> None:
    with serving(Hub(REPOS, sizes={"Big.gguf": 1 << 60})) as hub:
        assert "make room, or set HF_HOME" in _error(hub, tmp_path, "user/big")
    assert hub.served == []


def test_a_disk_that_becomes_full_is_one_sentence(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_keys: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(download, "hf_hub_download", full)
    assert "the disk is full" in _error(hub, tmp_path, "user/big")


def test_a_cache_that_cannot_be_written_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be stored" in _error(hub, blocked, "user/big")


def test_a_sidecar_and_a_calibration_come_along(hub: Hub, tmp_path: Path) -> None:
    path = _fetch(hub, tmp_path, "user/tiers")
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "Model-Q4_0.calibration.gguf",
        "Model-Q4_0.gguf",
        "Model-Q4_0.hobbit.gguf",
    ]


#
# the commands
#


@pytest.mark.slow
def test_from_a_repository_to_text(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in TINY_MODEL.iterdir()}
    with serving(Hub({"user/Tiny": files})) as hub:
        done = hub.run(tmp_path, "convert", "--low", "q4_0", "-hf", "user/Tiny")
        assert done.returncode == 0, done.stderr
        assert re.search(r"^pyhobbit: downloading model.safetensors of user/Tiny, \d", done.stderr, re.M)
    output = tmp_path / "Tiny-hobbit.gguf"
    with serving(Hub({"user/Tiny-GGUF": {"Tiny-F16.gguf": output.read_bytes()}})) as hub:
        answer = ("-p", "def f(x):", "-n", 4, "--temp", 0)
        done = hub.run(tmp_path, "chat", "user/Tiny-GGUF:f16", *answer)
        assert done.returncode == 0, done.stderr
        assert done.stdout == hub.run(tmp_path, "chat", output, *answer).stdout != ""
        sidecar = hub.run(tmp_path, "convert", "--low", "q2_k", "--sidecar", "-hf", "user/Tiny-GGUF")
        assert sidecar.returncode == 1
        assert "tiers" in sidecar.stderr
        assert len(hub.served) == 1


def test_errors_come_before_the_download(hub: Hub, tmp_path: Path) -> None:
    done = hub.run(tmp_path, "convert", "--low", "q4_9", "-hf", "user/checkpoint")
    assert done.returncode == 1
    assert "q4_9" in done.stderr
    done = hub.run(tmp_path, "chat", "-hf", "user/many", "--set", "t1=2", "-p", "x")
    assert done.returncode == 2
    assert "between 0 and 1" in done.stderr
    assert hub.served == []
    done = hub.run(tmp_path, "chat", "-hf", "user/many:Q3_K", "-p", "x")
    assert done.returncode == 1
    assert done.stderr == "pyhobbit: error: user/many has no Q3_K; it has Q8_0, UD-IQ2_XXS, q4_k_m\n"
