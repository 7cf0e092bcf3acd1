# SPDX-License-Identifier: MIT
"""Where the time of a token goes, from a timeline."""

import json
from pathlib import Path
from typing import Any

import pytest

from pyhobbit.errors import HobbitError
from pyhobbit.inspect.timeline import BETWEEN, token_parts


def _span(name: str, begin_us: float, us: float, thread: int = 1, **notes: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "tid": thread, "ts": begin_us, "dur": us, "args": notes}


def _write(path: Path, *spans: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"traceEvents": [*spans, {"ph": "M", "name": "process_name"}]}))
    return path


def test_parts_are_own_times_that_add_up(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "t.json",
        _span("pass", 0, 1000, tokens=7),  # the prompt
        _span("wait", 10, 500),
        _span("wait", 2100, 200),  # in the layer, written before what it lies in
        _span("layer", 2050, 400, layer=0),
        _span("experts", 2300, 100),
        _span("pass", 2000, 600, tokens=1),
        _span("read", 2000, 9000, thread=2, bytes=1),
        _span("pass", 2700, 300, tokens=1),
        _span("layer", 2700, 300, layer=0),
    )
    parts = token_parts(path, 2)
    assert parts == {
        "layers outside the cache": pytest.approx(100e-6),
        "other work in expert layers": pytest.approx(200e-6),
        "waiting for reads": pytest.approx(100e-6),
        "computing experts": pytest.approx(50e-6),
        BETWEEN: pytest.approx(50e-6),
    }
    assert sum(parts.values()) == pytest.approx(1000e-6 / 2)
    assert sum(token_parts(path, 1).values()) == pytest.approx(300e-6)


def test_a_timeline_with_too_few_tokens_is_an_error(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.json", _span("pass", 0, 1000, tokens=7), _span("pass", 2000, 1, tokens=1))
    with pytest.raises(HobbitError, match="has 1 passes over one token, not 2"):
        token_parts(path, 2)
