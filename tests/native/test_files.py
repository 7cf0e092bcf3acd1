# SPDX-License-Identifier: MIT
"""Files that several programs write at once, and texts in other encodings."""

import os
from pathlib import Path

import pytest

from pyhobbit.errors import HobbitError
from pyhobbit.native.files import atomic_output, open_regular, read_text, write_text


def test_of_several_writers_of_a_new_file_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with atomic_output(path, replaces=False) as first:
        first.write_text("one")
        with (
            pytest.raises(HobbitError, match=r"another program is writing .*m.gguf"),
            atomic_output(path, replaces=False),
        ):
            pass
    with (
        pytest.raises(HobbitError, match=r"another program has written .* meanwhile"),
        atomic_output(path, replaces=False) as late,
    ):
        late.write_text("two")
    assert path.read_text() == "one"
    with atomic_output(path) as forced:
        forced.write_text("three")
    assert path.read_text() == "three"
    assert list(tmp_path.iterdir()) == [path]


def test_without_links_a_new_file_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    path = tmp_path / "m.gguf"
    with atomic_output(path, replaces=False) as made:
        made.write_text("one")
    assert path.read_text() == "one"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_text_is_read_without_its_mark(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "text"
    path.write_bytes("größe\n".encode(encoding))
    assert read_text(path) == "größe\n"


@pytest.mark.parametrize("data", ["größe".encode("utf-16-le"), "größe".encode("utf-16")])
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "text").write_bytes(data)
    with pytest.raises(HobbitError, match=r"text is not a text .*save it as UTF-8"):
        read_text(tmp_path / "text")


def test_other_bytes_are_kept(tmp_path: Path) -> None:
    write_text(tmp_path / "text", "a")
    (tmp_path / "text").write_bytes(b"a\xe4")
    assert read_text(tmp_path / "text").encode("utf-8", "surrogateescape") == b"a\xe4"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "f")
