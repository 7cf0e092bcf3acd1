# SPDX-License-Identifier: MIT
"""Content of the cache of downloads, before and after a model is deleted."""

from pathlib import Path

import pytest
from fake_hub import Hub, at, gguf, serving

from pyhobbit.errors import HobbitError
from pyhobbit.model.download import fetch
from pyhobbit.model.downloaded import downloaded_models, models_in, remove
from pyhobbit.model.gguf_file import pack_header, string_entry

EMPTY = pack_header([string_entry("general.architecture", "llama")], [], 32)
PART = "big/M-Q8_0-0000{}-of-00002.gguf"
REPOS = {
    "user/many": {
        "M-Q4_K_M.gguf": EMPTY.ljust(100, b"4"),
        "M-Q4_K_M.hobbit.gguf": b"GGUF".ljust(50, b"l"),
        PART.format(1): EMPTY.ljust(200, b"8"),
        PART.format(2): EMPTY.ljust(200, b"9"),
        "mmproj-F16.gguf": b"GGUF",
    },
    "user/same": {"a-F16.gguf": gguf("a"), "b-F16.gguf": gguf("b")},
}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with both models of one repository, and both of another."""
    with serving(Hub(REPOS)) as hub, at(hub.endpoint):
        for name in ("user/many", "user/many:Q8_0", "user/same:a-F16.gguf", "user/same:b-F16.gguf"):
            fetch(name, cache=tmp_path)
    return tmp_path


def _names(cache: Path) -> list[str]:
    return [model.name for model in downloaded_models(cache)]


def test_models_are_listed_by_the_name_that_commands_take(cache: Path) -> None:
    assert _names(cache) == [
        "user/many:Q4_K_M",
        "user/many:Q8_0",
        "user/same:a-F16.gguf",
        "user/same:b-F16.gguf",
    ]
    sizes = {model.name: model.size for model in downloaded_models(cache)}
    assert sizes["user/many:Q4_K_M"] == 150
    assert sizes["user/many:Q8_0"] == 400
    assert all(model.path.read_bytes().startswith(b"GGUF") for model in downloaded_models(cache))
    with serving(Hub(REPOS)) as hub, at(hub.endpoint):
        for model in downloaded_models(cache):
            assert fetch(model.name, cache=cache) == model.path
        assert hub.served == []


def test_one_model_is_deleted_and_the_others_stay(cache: Path) -> None:
    files, size = remove("user/many:q8_0", cache)
    assert (sorted(files), size) == ([PART.format(1), PART.format(2)], 400)
    assert "user/many:Q8_0" not in _names(cache)
    assert len(_names(cache)) == 3
    left = sum(path.stat().st_size for path in cache.rglob("blobs/*") if path.is_file())
    assert left == 150 + 2 * len(gguf("a"))
    assert not [path for path in cache.rglob("*") if path.is_symlink() and not path.exists()]


def test_with_its_last_model_a_repository_goes(cache: Path) -> None:
    files, size = remove("user/many", cache)
    assert size == 550
    assert len(files) == 4
    assert not (cache / "models--user--many").exists()
    assert len(_names(cache)) == 2


@pytest.mark.parametrize("name", ["user/none", "user/many:Q2_K"])
def test_what_is_not_there_cannot_be_deleted(name: str, cache: Path) -> None:
    with pytest.raises(HobbitError, match="has not been downloaded; pyhobbit list shows"):
        remove(name, cache)
    assert len(_names(cache)) == 4


def test_an_incomplete_model_is_not_listed(cache: Path) -> None:
    next(cache.rglob(PART.format(2))).unlink()
    assert "user/many:Q8_0" not in _names(cache)


def test_a_cache_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert downloaded_models(tmp_path / "none") == []


def test_folders_are_listed_with_what_lies_below(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in REPOS["user/many"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "cut.gguf").write_bytes(EMPTY[:-40])
    found = {model.name: model.size for model in models_in(tmp_path)}
    assert found == {str(tmp_path / "M-Q4_K_M.gguf"): 150, str(tmp_path / PART.format(1)): 400}
    said = capsys.readouterr().err
    assert f"pyhobbit: skipped   {tmp_path / 'empty.gguf'} is empty" in said
    assert f"pyhobbit: skipped   {tmp_path / 'cut.gguf'} is damaged: it ends in the middle" in said
    with pytest.raises(HobbitError, match="is not a folder"):
        models_in(tmp_path / "none")


@pytest.mark.slow
def test_the_commands(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = hub.run(tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with serving(Hub(REPOS)) as hub:
        get = "has been downloaded; get one with: pyhobbit pull USER/NAME\n"
        assert run("list") == f"no model {get}"
        path = Path(run("pull", "https://huggingface.co/user/many").strip())
        assert path.name == "M-Q4_K_M.gguf"
        header, row = run("list").splitlines()
        assert header.split() == ["MODEL", "SIZE", "LAST", "USED", "FROM"]
        assert row.split()[:3] == ["user/many:Q4_K_M", "150", "B"]
        assert run("rm", "user/many:Q4_K_M").startswith("deleted M-Q4_K_M.gguf, M-Q4_K_M.hobbit.gguf (150")
        assert run("list").startswith("no model")
