# SPDX-License-Identifier: MIT
"""Other machines by RPC: one that is not there, speaks something else, or goes away is a sentence."""

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import RunPyhobbit
from ports import free_port
from servers import PROMPT, serving, streaming, wait_until

from pyhobbit.native.rpc_servers import PROTOCOL

_ROOT = Path(__file__).parents[2]
_GONE = "does not answer any more; start 'pyhobbit worker' there"
_LIMIT = 400 << 20


@contextmanager
def working(*options: object, port: int | None = None) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """The address of a worker, HOST:PORT, and its process."""
    port = port or free_port()
    command = [sys.executable, "-m", "pyhobbit", "worker", "--port", str(port), *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: _listens(port))
            yield f"127.0.0.1:{port}", process
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a program that answers each connection so."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return  # the test has ended
                with connection:
                    answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def _web(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.0 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + b" " * 100)


def _older(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall((28).to_bytes(8, "little") + bytes([6, 1, 0]) + bytes(25))


def _closes(_: socket.socket) -> None:
    pass


def test_the_protocol_is_llama_cpps() -> None:
    header = (_ROOT / "vendor/llama.cpp/ggml/include/ggml-rpc.h").read_text()
    found = [re.search(rf"RPC_PROTO_{part}_VERSION +(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    assert tuple(int(each[1]) for each in found if each) == PROTOCOL


@pytest.mark.parametrize("verb", ["chat", "inspect", "bench", "config", "serve"])
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (_web, "is no pyhobbit worker"),
        (_closes, "is no pyhobbit worker"),
        (_older, "speaks version 6.1.0 of the protocol, and this one 7.0.0"),
        (None, "no machine answers at"),
    ],
)
def test_what_is_no_worker_is_named(
    tiny_gguf: Path,
    run_pyhobbit: RunPyhobbit,
    verb: str,
    program: Callable[[socket.socket], None] | None,
    said: str,
) -> None:
    prompt = ("-p", "x") if verb == "chat" else ()
    with answering(program or _closes) as address:
        if program is None:
            address = f"127.0.0.1:{free_port()}"
        done = run_pyhobbit(verb, tiny_gguf, *prompt, "--rpc", address, "--device", "RPC0", timeout=60)
    assert done.returncode == 1
    assert said in done.stderr
    assert address in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_chat_whose_machine_goes_away_ends_with_a_sentence(tiny_gguf: Path) -> None:
    with working() as (address, worker):
        options = ["--rpc", address, "--device", "RPC0", "-n", "480", "--temp", "0", "-q", "--ctx", "512"]
        command = [sys.executable, "-m", "pyhobbit", "chat", str(tiny_gguf), "-p", "a", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as chat:
            assert chat.stdout
            assert chat.stderr
            assert chat.stdout.read(8)
            worker.kill()
            rest, said = chat.communicate(timeout=120)
    assert chat.returncode == 1
    assert _GONE in said.decode()
    assert address in said.decode()
    assert b"gdb" not in rest + said
    assert len(said.decode().strip().splitlines()) == 1


def test_a_model_whose_machine_goes_away_raises_and_may_be_opened_again(tiny_gguf: Path) -> None:
    """A process of its own computes, since the device stays registered."""
    script = """
import sys
from pyhobbit import Hobbit
from pyhobbit.errors import HobbitError
with Hobbit(sys.argv[1], rpc=sys.argv[2], device="RPC0", n_ctx=512) as model:
    pieces = model("a", max_tokens=400, stream=True, temperature=0)
    next(pieces)
    print("begun", flush=True)
    sys.stdin.readline()
    try:
        list(pieces)
    except HobbitError as e:
        print("raised", e, flush=True)
sys.stdin.readline()
with Hobbit(sys.argv[1], rpc=sys.argv[2], device="RPC0", n_ctx=512) as model:
    print("again", model("a", max_tokens=4)["usage"]["completion_tokens"])
"""
    with working() as (address, worker):
        command = [sys.executable, "-c", script, str(tiny_gguf), address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as process:
            assert process.stdout
            assert process.stdout.readline() == "begun\n"
            worker.kill()
            worker.wait()
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
            assert _GONE in process.stdout.readline()
            with working(port=int(address.rpartition(":")[2])):
                out, err = process.communicate("\n", timeout=120)
    assert process.returncode == 0, err
    assert "again 4" in out


def test_a_server_whose_machine_goes_away_comes_back_with_it(tiny_gguf: Path, tmp_path: Path) -> None:
    with (
        working() as (address, worker),
        serving(tiny_gguf, tmp_path / "log", "--rpc", address, "--device", "RPC0") as server,
    ):
        text = server.complete(n=24)
        with streaming(server, n_predict=400) as stream:
            worker.kill()
            rest = stream.read().decode()
        said = _GONE.partition(";")[0]
        assert said in rest
        answer = server.request("/completion", {"prompt": PROMPT, "n_predict": 4})
        assert (answer.status, said in answer.error) == (503, True)
        assert server.request("/health").status == 503
        assert address in server.request("/health").error
        worker.wait()
        with working(port=int(address.rpartition(":")[2])):
            wait_until(lambda: server.request("/health").status == 200)
            assert server.complete(n=24) == text
        assert server.process.poll() is None


def test_a_worker_keeps_to_its_memory(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    with working("--memory", _LIMIT) as (address, worker):
        done = run_pyhobbit(
            *("chat", tiny_gguf, "-p", PROMPT, "-n", 8, "--rpc", address, "--device", "RPC0"), timeout=60
        )
        assert done.returncode == 0, done.stderr
        status = Path(f"/proc/{worker.pid}/status").read_text()
        assert int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024 <= _LIMIT  # type: ignore[index]
        assert int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024 > 10 << 20  # type: ignore[index]


def test_a_worker_tells_who_comes_and_goes(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    port = free_port()
    command = [sys.executable, "-m", "pyhobbit", "worker", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        wait_until(lambda: _listens(port))
        options = ("--rpc", f"127.0.0.1:{port}", "--device", "RPC0")
        assert run_pyhobbit("chat", tiny_gguf, "-p", PROMPT, "-n", 2, *options, timeout=60).returncode == 0
        worker.terminate()
        said = worker.communicate(timeout=60)[0].splitlines()
    came = said.count("127.0.0.1: Accepted client connection")
    assert came >= 2  # the probe of the test, and the chat
    assert said.count("Client connection closed") == came


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--memory", "10M"), "is too small"),
        (("--threads", "0"), "must be at least 1"),
        (("--host", "300.1.1.1"), "300.1.1.1:50052 cannot be used"),
        (("--port", "70000"), "must be a number from 1 to 65535"),
        (("--port", "0"), "must be a number from 1 to 65535"),
    ],
)
def test_a_worker_refuses_what_it_cannot_be(
    run_pyhobbit: RunPyhobbit, options: tuple[str, str], said: str
) -> None:
    done = run_pyhobbit("worker", *options, timeout=60)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    with working() as (address, _):
        taken = run_pyhobbit("worker", "--port", address.rpartition(":")[2], timeout=60)
        assert taken.returncode == 1
        assert "give another --host or --port" in taken.stderr


def test_a_model_keeps_its_machine(tiny_gguf: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(tiny_gguf)
    with working() as (address, _):
        kept = run_pyhobbit("config", model, "--rpc", address, "--device", "RPC0", "--write", timeout=60)
        assert kept.returncode == 0, kept.stderr
        again = run_pyhobbit("chat", model, "-p", PROMPT, "-n", 4, timeout=60)
        assert again.returncode == 0, again.stderr
        with serving(model, tmp_path / "log") as server:
            assert server.complete(n=4)
    without = run_pyhobbit("chat", model, "-p", PROMPT, "-n", 4, timeout=60)
    assert f"no machine answers at {address}" in without.stderr
