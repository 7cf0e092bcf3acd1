# SPDX-License-Identifier: MIT
"""The script of the panel, with as much of a page as it uses and a real server's answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from py_mini_racer import MiniRacer
from servers import LONG, Server, serving, streaming

from pyhobbit.cli import server_flags
from pyhobbit.engine.stats import rates

PAGE = r"""
class Element {
  constructor() { this.parts = []; this.cells = []; this.style = {}; this.value = ""; }
  append(part) { this.parts.push(part); }
  add(part) { this.parts.push(part); }
  replaceChildren() { this.parts = []; }
  insertRow() { const row = new Element(); this.parts.push(row); return row; }
  insertCell() { const cell = new Element(); this.cells.push(cell); return cell; }
  get text() {
    if (this.cells.length) { return this.cells.map((cell) => cell.text).join("\t"); }
    const style = (part) => part.className ? part.className + part.style.width : "";
    const text = (part) => typeof part === "string" ? part : part.text + style(part);
    return this.textContent ?? this.parts.map(text).join("\n");
  }
}
const elements = {}, sent = [];
let answers = {}, later = null, kept = "k";
const document = {
  getElementById: (id) => elements[id] ??= new Element(), createElement: () => new Element(),
};
const sessionStorage = { getItem: () => kept, setItem: (_, key) => { kept = key; } };
const AbortSignal = { timeout: () => null };
const setTimeout = (run) => { later = run; }, prompt = () => "other";
class Option { constructor(text) { this.text = text; } }
async function fetch(path, options) {
  const address = "/" + path; // the page lies beside what it asks for, whatever the server's prefix
  sent.push([address, options?.headers?.Authorization]);
  const [status, body] = answers[address] ?? [404, {}];
  return { ok: status === 200, status, json: async () => body };
}
"""
TESTED = "{ elements, sent, tick: (others) => { answers = others; later(); } }"


class Panel:
    """A page that has started. Answers: status and body by path."""

    def __init__(self, js: MiniRacer) -> None:
        self._js = js

    def tick(self, answers: dict[str, Any]) -> None:
        """Gives the page its next answers."""
        self._js.eval(f"page.tick({json.dumps(answers)})")

    def text(self, name: str, field: str = "text") -> str:
        return str(self._js.eval(f"page.elements.{name}.{field}"))

    def sent(self) -> list[list[str]]:
        return json.loads(str(self._js.eval("JSON.stringify(page.sent)")))


@contextmanager
def showing(server: Server, answers: dict[str, Any]) -> Iterator[Panel]:
    script = server.request("/panel").text.split("<script>")[1].split("</script>")[0]
    parts = f"{PAGE}; answers = {json.dumps(answers)}; {script}; return {TESTED};"
    with MiniRacer() as js:  # left open it would keep the process from ending
        js.eval(f"const page = (() => {{ {parts} }})()")
        yield Panel(js)


@pytest.fixture(scope="module")
def server(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    lossy = ("--pools", "6M", "--set", "t1=0.6", "--set", "t2=0.9", "--parallel", 3)
    with serving(tiny_gguf, tmp_path_factory.mktemp("panel") / "log", *lossy, *LONG) as running:
        yield running


def _answers(server: Server) -> dict[str, Any]:
    return {path: [200, server.request(path).json] for path in ("/hobbit", "/v1/models")}


def test_the_panel_shows_what_two_clients_do(server: Server) -> None:
    with streaming(server), streaming(server, prompt="class A:"):
        before = _answers(server)
        server.complete(n=8)
        after = _answers(server)
    with showing(server, before) as panel:
        panel.tick(after)
        figures = dict(line.split("\t") for line in panel.text("figures").splitlines() if "\t" in line)
        assert panel.text("error") == ""
        assert {key for _, key in panel.sent()[1:]} == {"Bearer k"}
        assert "without its page" in panel.text("main", "innerHTML")
    told, after_counters = after["/hobbit"][1]["rates"], after["/hobbit"][1]
    found = rates(before["/hobbit"][1], after_counters, 1.0, after_counters["n_token_uses"])
    seconds = found.tokens_per_s / told["tokens_per_s"]
    found = rates(before["/hobbit"][1], after_counters, seconds, after_counters["n_token_uses"])
    assert told == pytest.approx(asdict(found), abs=1e-6)
    assert float(figures["tokens/s, with prompts"]) == pytest.approx(found.tokens_per_s, abs=0.06)
    assert float(figures["experts found in memory"].split()[0]) == pytest.approx(
        100 * (found.hit_rate or 0), abs=0.06
    )
    read = (found.bytes_read_per_token or 0) / 2**20
    assert float(figures["MiB per token"]) == pytest.approx(read, abs=0.06)
    assert 0 < float(figures["experts found in memory"].split()[0]) <= 100
    assert float(figures["MiB per token"]) > 0
    shares = [float(each.split()[0]) for each in figures["high, low, skipped"].split(", ")]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert min(shares) > 0


def test_without_a_page_the_address_is_the_panel(server: Server) -> None:
    answer = server.request("/")
    assert answer.status == 200
    assert (answer.text == server.request("/panel").text) != server_flags.has_web_page()


def test_the_panel_shows_how_far_a_prompt_is_read(server: Server) -> None:
    answers = _answers(server)
    part = {"slot": 1, "tokens": 512, "tokens_all": 4000, "tokens_pass": 400, "layers": 3, "layers_all": 6}
    answers["/hobbit"][1]["reading"] = [{**part, "seconds_left": 12.3}]
    with showing(server, answers) as panel:
        assert panel.text("prompts").startswith("slot 1 reads\t712 of 4000 tokens, 13 s left\n")


def test_the_panel_says_what_it_cannot_show(server: Server) -> None:
    with showing(server, {"/hobbit": [200, {"cached": False}]}) as panel:
        assert panel.text("error") == "The model runs without an expert cache."
        panel.tick({"/hobbit": [503, {"error": {"message": "Loading model"}}]})
        assert panel.text("error") == "Loading model"
        panel.tick({"/hobbit": [401, {"error": {"message": "Invalid API Key"}}]})
        panel.tick({})
        assert ["/hobbit", "Bearer other"] in panel.sent()  # it has asked for the key


def test_the_panel_lists_the_models_of_a_folder(server: Server) -> None:
    several = [{"id": "a b", "status": {}}, {"id": "c", "status": {}}]
    with showing(server, {"/v1/models": [200, {"data": several}]}) as panel:
        assert panel.text("model") == "a b\nc"
