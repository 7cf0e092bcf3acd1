# SPDX-License-Identifier: MIT
"""Several servers behind a proxy: each may be taken out, restarted and taken back, and no client notices."""

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest
import yaml
from servers import END_TIMEOUT_S, REQUEST_TIMEOUT_S, Server, free_port, running, wait_until

from pyhobbit.cli import serve, verbs
from pyhobbit.settings.config import parse_size

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
TOKENS = 200
_BODY = {"prompt": "def f(", "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}


def _ask(control: Path, command: str) -> str:
    """The proxy's answer to a command."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(control))
        connection.sendall(f"{command}\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


@contextmanager
def _proxied(folder: Path, ports: list[int]) -> Iterator[tuple[int, Path]]:
    """The port of HAProxy with the servers at these ports, and the path of its control socket."""
    control, port = folder / "control.sock", free_port()
    text = (DEPLOY / "haproxy.cfg").read_text("utf-8").replace("/run/haproxy.sock", str(control))
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    for name, address in zip(("10.0.0.2:8080", "10.0.0.3:8080"), ports, strict=True):
        assert name in text
        text = text.replace(name, f"127.0.0.1:{address}")
    (folder / "haproxy.cfg").write_text(text, "utf-8")
    with subprocess.Popen(["haproxy", "-f", folder / "haproxy.cfg"]) as process:
        try:
            wait_until(control.exists)
            yield port, control
        finally:
            process.terminate()


class _Clients:
    """Four clients that stream answers one after the other, and try none again."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._go_on) for _ in range(4)]

    def __enter__(self) -> "_Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Returns once the running answers are read."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _go_on(self) -> None:
        while not self._ended.is_set():
            try:
                self.answers.append(self._answer())
            except (OSError, AssertionError, http.client.HTTPException) as e:
                self.failures.append(repr(e))

    def _answer(self) -> str:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_TIMEOUT_S)) as client:
            client.request("POST", "/v1/completions", json.dumps(_BODY), {"Content-Type": "application/json"})
            with client.getresponse() as answer:
                assert answer.status == 200, answer.read()
                lines = [line[6:] for line in answer if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]\n", lines[-1]
        pieces = [json.loads(line) for line in lines[:-1]]
        assert pieces[-1]["usage"]["completion_tokens"] == TOKENS
        return "".join(piece["choices"][0]["text"] for piece in pieces)

    def more(self, n: int) -> None:
        """Waits until they have got so many more answers."""
        before = len(self.answers)
        wait_until(lambda: self.failures or len(self.answers) >= before + n)


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
def test_servers_behind_a_proxy_are_restarted_under_clients(tiny_gguf: Path, tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "pyhobbit", "serve", tiny_gguf, "--pools", "4M", "--ctx-size", 2048]
    command += ["--parallel", 4, "--drain", 600]

    def serving(name: str) -> AbstractContextManager[Server]:
        return running(command, tmp_path / f"{name}.log", port=ports[("one", "two").index(name)])

    with serving("one") as one, serving("two") as two, _proxied(tmp_path, ports) as (port, control):

        def is_up(name: str) -> bool:
            return bool(re.search(rf"^pyhobbit,{name},.*,UP,", _ask(control, "show stat"), re.MULTILINE))

        wait_until(lambda: is_up("one") and is_up("two"))
        with _Clients(port) as clients:
            clients.more(4)
            # the proxy drains it
            wait_until(lambda: one.busy_slots() > 0)
            _ask(control, "set server pyhobbit/one state drain")
            wait_until(lambda: one.busy_slots() == 0)
            one.process.terminate()
            assert one.process.wait(END_TIMEOUT_S) == 0
            with serving("one") as again:
                _ask(control, "set server pyhobbit/one state ready")
                wait_until(lambda: is_up("one"))
                wait_until(lambda: clients.failures or again.busy_slots() > 0)
                # it drains itself
                wait_until(lambda: two.busy_slots() > 0)
                two.process.terminate()
                assert two.process.wait(END_TIMEOUT_S) == 0
                with serving("two") as back:
                    wait_until(lambda: is_up("two"))
                    wait_until(lambda: clients.failures or back.busy_slots() > 0)
                    clients.more(8)
                    clients.end()
        assert not clients.failures
        assert len({*clients.answers}) == 1


def test_the_pods_serve_with_the_memory_that_they_ask_for() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8"))
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    args = serve.parse(verbs.parser_of("serve"), container["args"][1:])
    for each in ("requests", "limits"):
        assert parse_size(container["resources"][each]["memory"].removesuffix("i")) == parse_size(args.memory)
    assert pod["spec"]["terminationGracePeriodSeconds"] > args.drain
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    labels = deployment["spec"]["selector"]["matchLabels"]
    assert labels == service["spec"]["selector"] == pod["metadata"]["labels"]
