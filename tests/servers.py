# SPDX-License-Identifier: MIT
"""Servers for tests: `pyhobbit serve`, or any llama-server, on a free port until the block ends."""

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import pytest
from ports import free_port

START_TIMEOUT_S = 120
END_TIMEOUT_S = 60
REQUEST_TIMEOUT_S = 300
# a context of the tiny model with an answer that still goes on when the slowest machine looks at it
LONG = ("--override-kv", "llama.context_length=int:40000", "--ctx-size", 40_000)
LONG_ANSWER = 30_000
_WARM_UP = 50  # requests after which the allocators hold what they need
PROMPT = "def read_file(path):\n"
PYHOBBIT = (sys.executable, "-m", "pyhobbit")
Process = subprocess.Popen[bytes] | forked.Running


@dataclass(frozen=True)
class Answer:
    """An answer of any status."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> str:
        return self.json["error"]["message"]


@dataclass(frozen=True)
class Server:
    """One that listens. log: file with what it prints."""

    url: str
    process: Process
    log: Path
    key: str | None = None

    def request(self, path: str, body: object = None, key: str | None = None) -> Answer:
        """GET, or POST of a body: JSON, but bytes go as they are."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or self.key}"}
        with closing(self.connection()) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has a whole body
                connection.request("GET" if data is None else "POST", path, data, headers)
            with connection.getresponse() as answer:
                return Answer(answer.status, answer.read().decode())

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=REQUEST_TIMEOUT_S)

    def complete(self, prompt: str = PROMPT, n: int = 32, **options: object) -> str:
        """The greedy continuation."""
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "cache_prompt": False, **options}
        answer = self.request("/completion", body)
        assert answer.status == 200, answer.text
        return answer.json["content"]

    def logprobs(self, prompt: str = PROMPT, n: int = 8, **options: object) -> tuple[list[float], int]:
        """Log probabilities of the five likeliest tokens at each place of the greedy continuation; prompt
        tokens computed."""
        body = {
            "prompt": prompt,
            "n_predict": n,
            "temperature": 0,
            "n_probs": 5,
            "ignore_eos": True,
            **options,
        }
        answer = self.request("/completion", body)
        assert answer.status == 200, answer.text
        places = answer.json["completion_probabilities"]
        assert len(places) == n
        values = [each["logprob"] for place in places for each in place["top_logprobs"]]
        return values, answer.json["timings"]["prompt_n"]

    def busy_slots(self) -> int:
        return sum(slot["is_processing"] for slot in self.request("/slots").json)

    def memory(self) -> int:
        """Bytes of its resident set."""
        return _bytes(self.process.pid, "VmRSS")

    def peak(self) -> int:
        """Bytes of its resident set when it was largest."""
        return _bytes(self.process.pid, "VmHWM")

    def cpu_s(self) -> float:
        """Seconds that its threads have computed, in sum."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def children(self, name: str = "VmRSS") -> dict[str, int]:
        """Bytes of the resident sets of the processes that it has started, by command line."""
        files = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        return {Path(f"/proc/{pid}/cmdline").read_text(): _bytes(pid, name) for pid in pids}

    def cache(self) -> dict[str, Any]:
        """The expert cache's sizes and counters."""
        return self.request("/hobbit").json


def _bytes(pid: int, name: str) -> int:
    """The kernel's count of the process under this name."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def wait_until(condition: Callable[[], object]) -> None:
    """Waits for it as long as for a server's start, so that only a defect fails it."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def streaming(server: Server, **options: object) -> Iterator[http.client.HTTPResponse]:
    """A long answer that has begun; leaving closes its connection."""
    body = {"prompt": PROMPT, "n_predict": LONG_ANSWER, "stream": True, "ignore_eos": True, **options}
    with closing(server.connection()) as connection:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            assert any(line.startswith(b"data:") for line in answer)  # behind pings
            yield answer


def _start(command: list[str], log: Path) -> Process:
    with log.open("wb") as out:
        if command[:3] == [*PYHOBBIT]:
            files = [os.devnull, str(log), str(log)]
            return forked.PYHOBBIT.start(command[3:], files, Path.cwd(), os.environ)
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


@contextmanager
def running(
    command: Sequence[object], log: Path, key: str | None = None, port: int | None = None
) -> Iterator[Server]:
    """The command with a port, a free one by default, once its server is healthy."""
    port = port or free_port()
    process = _start([*map(str, command), "--port", str(port)], log)
    server = Server(f"http://127.0.0.1:{port}", process, log, key)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@contextmanager
def serving(model: Path, log: Path, *options: object, key: str | None = None) -> Iterator[Server]:
    """`pyhobbit serve MODEL`, with a context of 512 tokens unless the options say otherwise."""
    context = () if "--ctx-size" in options else ("--ctx-size", 512)
    keys = () if key is None else ("--api-key", key)
    command = [*PYHOBBIT, "serve", model, *context, *keys, *options]
    with running(command, log, key) as server:
        yield server


@contextmanager
def working(*options: object, port: int | None = None) -> Iterator[tuple[str, forked.Running]]:
    """The address of a worker, HOST:PORT, and its process."""
    port = port or free_port()
    command = ["worker", "--port", port, *options]
    process = forked.PYHOBBIT.start(command, [os.devnull] * 3, Path.cwd(), os.environ)
    try:
        wait_until(lambda: listens(port))
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log.read_text(errors="replace")[-4000:]
        try:
            if server.request("/health").status == 200:
                return
        except OSError:
            pass  # it does not listen yet
        time.sleep(0.1)
    pytest.fail("the server did not get ready")


def growth(server: Server, n: int) -> int:
    """Bytes by which n requests of all kinds (ask) let the server's resident set grow, after some others."""
    numbers = random.Random(1)
    for _ in range(_WARM_UP):
        ask(server, numbers)
    before = server.memory()
    for _ in range(n):
        ask(server, numbers)
    return server.memory() - before


def ask(server: Server, numbers: random.Random) -> None:
    """A completion, chat, answer by a JSON schema, or malformed body; streamed and with thresholds or not."""
    text = f"# {numbers.random()}\n" + "def f(x):\n" * numbers.randrange(1, 20)
    options = {
        "max_tokens": numbers.randrange(1, 9),
        "stream": numbers.random() < 0.5,
        "hobbit": {"t1": 1} if numbers.random() < 0.5 else None,
    }
    chat = {"messages": [{"role": "user", "content": text}], **options}
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"type": "integer"}}}}
    path, body, status = numbers.choice(
        [
            ("/v1/completions", {"prompt": text, **options}, 200),
            ("/v1/chat/completions", chat, 200),
            ("/v1/chat/completions", {**chat, "response_format": form}, 200),
            ("/v1/chat/completions", b"{", 400),
        ]
    )
    answer = server.request(path, body)
    assert answer.status == status, answer.text
