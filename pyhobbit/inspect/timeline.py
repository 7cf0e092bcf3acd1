# SPDX-License-Identifier: MIT
"""Where the time of a token goes, from a timeline that the engine wrote."""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyhobbit.errors import HobbitError

# Names of a span's own time, without the spans inside it; other spans keep their names.
_OWN = {
    "pass": "layers outside the cache",
    "layer": "other work in expert layers",
    "experts": "computing experts",
    "wait": "waiting for reads",
    "request": "eviction and requests",
    "look ahead": "prefetch",
    "plan": "precision rule",
    "routing": "reading the routing",
    "embedding": "reading the embedding",
}
BETWEEN = "sampling, and the program"


def token_parts(path: Path, n_tokens: int) -> dict[str, float]:
    """Mean seconds of the last n_tokens passes over one token, by what the computing thread did in them.

    The parts add up to the time from the first of these passes to the end of the last one, less passes over
    several tokens between them, per token. Raises HobbitError where the file has fewer passes.
    """
    spans = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    passes = [e for e in spans if e["name"] == "pass"]
    single = [e for e in passes if e["args"]["tokens"] == 1][-n_tokens:]
    if len(single) < n_tokens:
        raise HobbitError(f"{path} has {len(single)} passes over one token, not {n_tokens}")
    own = [e for e in spans if e["tid"] == single[0]["tid"]]
    parts: dict[str, float] = defaultdict(float)
    for span, inside in _nested(own):
        if _begins_within(span, single):
            parts[_OWN.get(span["name"], span["name"])] += span["dur"] - inside
    first, last = single[0]["ts"], _end(single[-1])
    busy = sum(e["dur"] for e in passes if first <= e["ts"] < last)
    parts[BETWEEN] = last - first - busy
    return {name: us / 1e6 / n_tokens for name, us in sorted(parts.items(), key=lambda part: -part[1])}


def _end(span: Mapping[str, Any]) -> float:
    return float(span["ts"] + span["dur"])


def _begins_within(span: Mapping[str, Any], passes: list[dict[str, Any]]) -> bool:
    """Tells if one of the passes, which are ordered by time, was under way when the span began."""
    i = bisect_right(passes, span["ts"], key=lambda each: each["ts"]) - 1
    return i >= 0 and span["ts"] < _end(passes[i])


def _nested(spans: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], float]]:
    """Each span of one thread, and the microseconds of the spans directly inside it."""
    inside: dict[int, float] = defaultdict(float)
    ordered = sorted(spans, key=lambda each: (each["ts"], -each["dur"]))
    around: list[dict[str, Any]] = []
    for span in ordered:
        while around and _end(around[-1]) <= span["ts"]:
            around.pop()
        if around:
            inside[id(around[-1])] += span["dur"]
        around.append(span)
    return [(span, inside[id(span)]) for span in ordered]
