# SPDX-License-Identifier: MIT
"""The container and the service run what pyhobbit understands; the service's command is started here."""

import contextlib
import http.client
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from servers import END_TIMEOUT_S, REQUEST_TIMEOUT_S, free_port, running, wait_until

from bench.harness import system
from pyhobbit.cli import serve, server_flags, verbs

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "pyhobbit.service").read_text("utf-8")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ")


def _steps(name: str) -> list[str]:
    """Values of an instruction of the Dockerfile, or of a key of the unit."""
    return re.findall(rf"^{name}[ =](.*)$", DOCKERFILE + UNIT, re.MULTILINE)


def _served(words: list[str]) -> dict[str, object]:
    """Parses a command like `pyhobbit serve`; raises for an unknown option."""
    assert Path(words[0]).name == "pyhobbit"
    assert words[1] == "serve"
    args = serve.parse(verbs.parser_of("serve"), words[2:])
    serve.cache_config(args)
    return vars(args)


def _entry() -> list[str]:
    (entry,) = _steps("ENTRYPOINT")
    return json.loads(entry)


def test_the_container_serves_the_folder_that_is_mounted() -> None:
    (command,) = (each for each in _steps("CMD") if each.startswith('["serve'))
    (folder,) = _steps("WORKDIR")
    assert _served([*_entry(), *json.loads(command)])["passed_on"] == ["--models-dir", folder]
    (example,) = re.findall(r"docker run .* pyhobbit (serve .*)", DOCKERFILE)
    served = _served([*_entry(), *shlex.split(example)])
    assert (served["model"], served["memory"]) == ("mixtral-Q4_K_M.gguf", "8G")
    assert f":{folder}:ro " in DOCKERFILE


def test_the_container_listens_where_its_port_leads_to() -> None:
    variables = dict(each.split("=", 1) for each in _steps("ENV"))
    flags = serve.known()
    assert flags["--host"].variable in variables
    assert variables[flags["--host"].variable] == "0.0.0.0"
    assert _steps("EXPOSE") == [server_flags.PORT]


def test_the_container_has_no_root() -> None:
    last = DOCKERFILE.rindex("\nFROM ")
    (user,) = re.findall(r"^USER (\w+)", DOCKERFILE[last:], re.MULTILINE)
    assert f"useradd --create-home {user}" in DOCKERFILE
    assert user != "root"
    assert DOCKERFILE.index("\nENTRYPOINT") > DOCKERFILE.index(f"\nUSER {user}")


def test_the_context_of_the_image_is_what_it_copies() -> None:
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").split()
    (copied,) = (step.split()[:-1] for step in _steps("COPY") if "--from" not in step)
    assert allowed[0] == "*"
    assert {each.removeprefix("!") for each in allowed[1:]} == {*copied}


@pytest.fixture(params=[200, 503])
def health(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A server that answers /health with this status, and its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(request.param if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield request.param, server.server_port
        server.shutdown()
        thread.join()


def test_the_health_check_tells_a_server_that_answers(health: tuple[int, int]) -> None:
    status, port = health
    (check,) = (each for each in _steps("HEALTHCHECK"))
    command = json.loads(check[check.index("[") :])
    assert command[0] == "python3"
    assert f":{server_flags.PORT}/health" in command[2]
    program = command[2].replace(f":{server_flags.PORT}/", f":{port}/")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode == 0) == (status == 200)


def test_the_service_runs_the_server() -> None:
    (command,) = _steps("ExecStart")
    served = _served(shlex.split(command))
    assert served["passed_on"][:2] == ["--models-dir", "/srv/models"]
    variables = dict(each.split("=", 1) for each in _steps("Environment"))
    assert variables["HF_HOME"] == f"/var/lib/{_steps('StateDirectory')[0]}"


def test_the_service_restarts_under_clients_within_its_memory(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").symlink_to(tiny_gguf)
    (command,) = _steps("ExecStart")
    words = [sys.executable, "-m", "pyhobbit", *shlex.split(command)[1:], "--ctx-size", "2048"]
    words[words.index("/srv/models")] = str(tmp_path / "models")
    body = {"model": "tiny", "prompt": "def f(", "n_predict": 1500, "stream": True, "ignore_eos": True}
    port = free_port()
    try:
        with system.memory_cgroup(400 << 20) as cgroup:
            for _ in range(2):
                with running(cgroup.joining(words), tmp_path / "log", port=port) as server:
                    client = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
                    with contextlib.closing(client):
                        client.request("POST", "/completion", json.dumps(body))
                        with client.getresponse() as answer:
                            assert answer.readline().startswith(b"data: {")
                            server.process.terminate()  # as systemctl restart does
                            with contextlib.suppress(http.client.IncompleteRead):
                                answer.read()
                    server.process.wait(END_TIMEOUT_S)
                wait_until(lambda: not cgroup.procs.read_text())  # nor a model's own server
    except system.NoCgroupError as e:
        pytest.skip(str(e))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_service(tmp_path: Path) -> None:
    unit = tmp_path / "pyhobbit.service"
    # the path of an existing program
    unit.write_text(UNIT.replace("/opt/pyhobbit/bin/pyhobbit", sys.executable), "utf-8")
    command = ["systemd-analyze", "verify", "--man=no", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
