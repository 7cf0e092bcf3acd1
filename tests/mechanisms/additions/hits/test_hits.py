# SPDX-License-Identifier: MIT
"""A route of the server in a folder of its own."""

from pathlib import Path

from servers import serving


def test_by_a_request(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--pools", "6M") as server:
        assert server.complete()
        assert server.request("/hits").json["hits"] == server.cache()["hits_by_layer"]
