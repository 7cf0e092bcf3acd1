# SPDX-License-Identifier: MIT
"""Shows a running server: token/s, where the time goes, hits, precision and disk.

It asks pyhobbit serve for its counters, once per second; Ctrl-C ends it.
"""

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyhobbit.cli.server_flags import HOST, PORT
from pyhobbit.engine.stats import Pool
from pyhobbit.errors import HobbitError
from pyhobbit.settings.config import format_size

_URL = f"{HOST}:{PORT}"
_TIMEOUT_S, _INTERVAL_S = 5, 1
_BARS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60  # intervals
_CLEAR = "\x1b[H\x1b[2J"

Sample = Mapping[str, Any]
"""The answer of /hobbit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", nargs="?", metavar="URL", help=f"address, HOST:PORT or PORT (default: {_URL})")
    add("--model", metavar="NAME", help="the model to watch, of a server of several")
    add("--api-key", metavar="KEY", help="key of the server, if it wants one")
    add("--once", action="store_true", help="print one interval and exit")
    add("--json", action="store_true", help="print each interval's answer of /hobbit, a line of JSON")


def run(args: argparse.Namespace) -> int:
    url = (args.url or _URL).rstrip("/").removesuffix("/v1")
    is_port = url.partition("/")[0].isdecimal()
    url = ("" if "://" in url else "http://127.0.0.1:" if is_port else "http://") + url
    model = args.model or _loaded_model(url, args.api_key)
    _ask(url, model, args.api_key)  # its rates are those since the start
    rates: deque[float] = deque(maxlen=_HISTORY)
    while True:
        time.sleep(_INTERVAL_S)
        now = _ask(url, model, args.api_key)
        rates.append(now["rates"]["tokens_per_s"] or 0)
        text = "\n".join([f"pyhobbit serve at {url}", "", *lines(now, rates)])
        if args.json:
            text = json.dumps(now)
        elif not args.once and sys.stdout.isatty():
            width, height = shutil.get_terminal_size()
            text = _CLEAR + "\n".join(line[:width] for line in text.splitlines()[: height - 1])
        print(text, flush=True)
        if args.once:
            return 0


def _loaded_model(url: str, key: str | None) -> str | None:
    """The only one that a server of several has loaded; None where there is none, or no such server."""
    from http.client import HTTPException

    loaded = []
    unlike = (ValueError, KeyError, TypeError, AttributeError)  # it is another program; _ask() tells
    with contextlib.suppress(OSError, HTTPException, *unlike):
        models = _get(f"{url}/v1/models", key)["data"]
        loaded = [each["id"] for each in models if each.get("status", {}).get("value") == "loaded"]
    return loaded[0] if len(loaded) == 1 else None


def _get(url: str, key: str | None) -> Any:
    from urllib.request import ProxyHandler, Request, build_opener  # no proxy knows our servers

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with build_opener(ProxyHandler({})).open(Request(url, headers=headers), timeout=_TIMEOUT_S) as answer:
        return json.load(answer)


def _ask(url: str, model: str | None, key: str | None) -> Sample:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.parse import urlencode

    which = {"model": model, "autoload": "false"} if model else {}  # looking must not load a model
    try:
        sample = _get(f"{url}/hobbit?{urlencode(which)}", key)
    except HTTPError as e:
        raise HobbitError(f"{url} gives no counters: {_reason(e, model)}") from e
    except (OSError, ValueError, HTTPException) as e:
        reason = getattr(e, "reason", e)
        raise HobbitError(f"no pyhobbit serve answers at {url} ({reason}); give its address") from e
    if not sample.get("cached"):
        raise HobbitError(f"the model at {url} runs without an expert cache, so there is nothing to show")
    if "rates" not in sample:
        raise HobbitError(f"the server at {url} is of another version of pyhobbit; start it with this one")
    return sample


def _reason(error: Any, model: str | None) -> str:
    several = "it has several models; give --model NAME"
    reasons = {
        400: f"the model {model} is not loaded there" if model else several,  # servers of several answer it
        401: "it wants --api-key",
        404: "it has none there; with --api-prefix /NAME, for example, give HOST:PORT/NAME",
    }
    return reasons.get(error.code, f"it answers with status {error.code}")


def lines(now: Sample, rates: Sequence[float]) -> Iterator[str]:
    """The screen. rates: passes per second of the intervals so far."""
    rate = rates[-1]
    peak = max(rates) or 1.0
    history = "".join(_BARS[round(rate / peak * (len(_BARS) - 1))] for rate in rates)
    yield f"token/s   {rate:7.1f}  {history}"
    found = now["rates"]
    waiting, experts = found["stall_share"] or 0, found["expert_share"] or 0
    other = max(0.0, 1 - experts - waiting)
    busy = f"experts {experts:.0%} · disk {waiting:.0%} · other {other:.0%}"
    yield f"time      {busy if rate or now.get('reading') else 'idle'}"
    for tier, hits in (("high", found["hit_rate_high"]), ("low", found["hit_rate_low"])):
        if n_slots := now[f"pool_slots_{tier}"]:
            used = "not used" if hits is None else f"{hits:.1%} hits"
            n_experts = now["n_all_experts"] - now[f"n_absent_{tier}"]
            pool = Pool(tier, n_slots, n_experts, now[f"pool_bytes_{tier}"])
            yield f"{tier:<9} {used}, experts in memory: {pool}"
    for each in now.get("reading", ()):
        left = f", {each['seconds_left']:.0f} s left" if "seconds_left" in each else ""
        yield (
            f"prompt    {each['tokens']} of {each['tokens_all']} tokens in slot {each['slot']}, "
            f"layer {each['layers']} of {each['layers_all']} of the next {each['tokens_pass']}{left}"
        )
    shares = {"high": found["high_share"], "low": found["low_share"], "skipped": found["skipped_share"]}
    used = ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share is not None)
    yield f"precision {used or 'no expert was used'}"
    per_token = found["bytes_read_per_token"]
    each = "" if per_token is None else f", {format_size(per_token)} per token"
    yield f"disk      {format_size(found['bytes_read_per_s'] or 0)}/s{each}"
