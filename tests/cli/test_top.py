# SPDX-License-Identifier: MIT
"""The view of a running server."""

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from pyhobbit._tables import COUNTERS
from pyhobbit.cli.main import main
from pyhobbit.cli.top import lines
from pyhobbit.engine.stats import rates

INFO = {
    "cached": True,
    "n_layers": 5,  # one of them is a draft head's that nobody loads
    "n_experts": 8,
    "n_experts_used": 8,  # in one layer, and fewer in the others
    "n_all_experts": 32,
    "n_absent_high": 0,
    "n_absent_low": 0,
    "n_token_uses": 16,
    "pool_bytes_high": 3 << 20,
    "pool_slots_high": 16,
    "pool_bytes_low": 0,
    "pool_slots_low": 0,
}
BEFORE = {
    **INFO,
    **{each.name: 0 for each in COUNTERS},
}
NOW = {
    **BEFORE,
    "layers_computed": 80,
    "compute_s": 1.5,
    "stall_s": 0.5,
    "bytes_read": 20 << 20,
    "hits_high": 150,
    "misses_high": 10,
    "selections_high": 120,
    "selections_low": 30,
    "selections_skipped": 10,
    "prefetched": 40,
    "prefetched_used": 10,
    "prefetch_active": 1,
}


def _lines(before: dict[str, Any], now: dict[str, Any], *speeds: float) -> list[str]:
    told = {**now, "rates": asdict(rates(before, now, 2.0, INFO["n_token_uses"]))}
    return list(lines(told, speeds))


def _screen(before: dict[str, Any], now: dict[str, Any], *speeds: float) -> dict[str, str]:
    return {line.split()[0]: line for line in _lines(before, now, *speeds)}


def test_the_screen_has_the_rates_of_the_interval() -> None:
    screen = _screen(BEFORE, NOW, 5.0, 10.0)
    assert screen["token/s"] == "token/s      10.0  ▄█"
    text = "\n".join(screen.values())
    for each in (
        "93.8% hits, experts in memory: 16 of 32 (3.0 MiB)",
        "75% high, 19% low, 6% skipped",
        "disk      10.0 MiB/s, 2.0 MiB per token",
    ):
        assert each in text
    assert max(map(len, _lines(BEFORE, NOW, 5.0, 10.0))) < 80
    assert screen["time"] == "time      experts 50% · disk 25% · other 25%"
    assert rates(BEFORE, NOW, 2.0, INFO["n_token_uses"]).tokens_per_s == 5
    prompt = {"slot": 1, "tokens": 512, "tokens_all": 4000, "tokens_pass": 256, "layers": 3, "layers_all": 24}
    reads = {**NOW, "reading": [{**prompt, "seconds_left": 12.3}]}
    assert _screen(BEFORE, reads, 1.0)["prompt"] == (
        "prompt    512 of 4000 tokens in slot 1, layer 3 of 24 of the next 256, 12 s left"
    )
    busy = _screen(BEFORE, {**NOW, "compute_s": 9.0, "stall_s": 3.0}, 1.0)  # threads add up
    assert busy["time"] == "time      experts 0% · disk 100% · other 0%"
    assert "low  " not in text


def test_an_idle_server_or_one_that_began_anew_shows_nothing_strange() -> None:
    for before, now in ((BEFORE, BEFORE), (NOW, BEFORE)):
        text = "\n".join(_lines(before, now, 0.0))
        assert "token/s       0.0" in text
        assert "no expert was used" in text
        assert "time      idle\n" in text
        assert "nan" not in text
        assert "-" not in text.replace("llama-", "")


@pytest.fixture
def address() -> Iterator[str]:
    """A server whose counters grow with each question; /plain is one without a cache, /many of several."""
    speeds = asdict(rates(BEFORE, NOW, 2.0, INFO["n_token_uses"]))
    answers = iter([{**each, "rates": speeds} for each in (BEFORE, NOW)])
    models = [{"id": "a", "status": {"value": "unloaded"}}, {"id": "b", "status": {"value": "loaded"}}]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer k"
            lacks_name = self.path == "/many/hobbit?"
            self.send_response(400 if lacks_name else 200 if known else 401)
            self.end_headers()
            if known and not lacks_name:
                is_plain = self.path.startswith("/plain")
                answer = {"data": models if "many" in self.path else [{"id": "m"}]}
                if "models" not in self.path:
                    answer = {"cached": False} if is_plain else next(answers)
                self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_one_interval_can_be_printed(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", f"{address}/v1", "--api-key", "k", "--once"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"pyhobbit serve at {address}\n")
    assert "93.8% hits" in text
    assert "\x1b" not in text


def test_of_several_models_the_loaded_one_is_shown(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", f"{address}/many", "--api-key", "k", "--once"]) == 0
    assert "93.8% hits" in capsys.readouterr().out


def test_the_server_is_asked_without_a_proxy(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert main(["top", address, "--api-key", "k", "--once"]) == 0
    assert "93.8% hits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "gives no counters: it wants --api-key"),
        (["--api-key", "k"], "runs without an expert cache"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(
    arguments: list[str], message: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", f"{address}/plain", "--once", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "url"),
    [("9", "127.0.0.1:9"), ("127.0.0.1:9", "127.0.0.1:9"), ("localhost:x", "localhost:x"), ("a b", "a b")],
)
def test_no_server_is_one_sentence(given: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", given, "--once"]) == 1
    assert f"no pyhobbit serve answers at http://{url}" in capsys.readouterr().err
