# SPDX-License-Identifier: MIT
"""Other machines by RPC: one that is not there, speaks something else, or goes away is a sentence."""

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kills
import on_rpc
import pytest
from conftest import RunPyhobbit
from ports import free_port
from relay import relaying
from servers import PROMPT, listens, serving, streaming, wait_until, working

from bench.harness.files import SHAPES, write_model
from pyhobbit.errors import HobbitError
from pyhobbit.native import rpc_servers
from pyhobbit.native.rpc_servers import PROTOCOL

_ROOT = Path(__file__).parents[2]
_GONE = "does not answer any more; start 'pyhobbit worker' there"
_LIMIT = 400 << 20


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


def _reads_a_line(connection: socket.socket) -> None:
    connection.makefile("rb").readline()


def _greets(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")
    threading.Event().wait(30)


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
        (_reads_a_line, "is no pyhobbit worker"),  # as a web server does
        (_greets, "is no pyhobbit worker"),
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


def test_a_worker_with_another_client_is_said_to_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_servers, "_TIMEOUT_S", 0.3)
    with working() as (address, _):
        host, _, port = address.rpartition(":")
        said = f"{address} .timed out after .* one program at a time"
        with socket.create_connection((host, int(port))), pytest.raises(HobbitError, match=said):
            rpc_servers.check_rpc_servers(address)
        rpc_servers.check_rpc_servers(address)


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


def test_memory_of_a_machine_that_has_gone_away_does_not_end_the_process() -> None:
    """It goes between two messages: the one that takes memory, and the one that asks where that begins."""
    script = """
import ctypes, sys
from pyhobbit.native import rpc_servers
rpc_servers.add_rpc_servers(sys.argv[1])
base = ctypes.CDLL(str(rpc_servers.LIB_DIR / "libggml-base.so"))
ggml = ctypes.CDLL(str(rpc_servers.LIB_DIR / "libggml.so"))
for each in (ggml.ggml_backend_dev_by_name, base.ggml_backend_dev_buffer_type,
             base.ggml_backend_buft_alloc_buffer, base.ggml_backend_buffer_get_base):
    each.restype = ctypes.c_void_p
device = ctypes.c_void_p(ggml.ggml_backend_dev_by_name(b"RPC0"))
kind = ctypes.c_void_p(base.ggml_backend_dev_buffer_type(device))
taken = ctypes.c_void_p(base.ggml_backend_buft_alloc_buffer(kind, ctypes.c_size_t(1024)))
print("taken", flush=True)
input()
print(base.ggml_backend_buffer_get_base(taken) is not None)
"""
    with working() as (address, worker):
        command = [sys.executable, "-c", script, address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, text=True, **pipes) as process:
            assert process.stdout
            assert process.stdout.readline() == "taken\n"
            worker.kill()
            worker.wait()
            assert process.communicate("\n", timeout=60)[0].splitlines()[-1] == "True"


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


def test_a_worker_may_be_killed_at_any_time_under_load(tiny_gguf: Path) -> None:
    *seen, said = kills.killed_at_random(tiny_gguf, n_kills=3, seed=1)
    found = kills.summary(*seen)
    assert found["failed otherwise"] == found["processes left"] == [], said[-4000:]
    assert found["wrong texts"] == 0
    assert found["kills"] == 3


def test_a_worker_keeps_to_its_memory(run_pyhobbit: RunPyhobbit, tmp_path: Path) -> None:
    """The experts take more than the worker lends: it holds as many as it can, or one sentence says so."""
    model = write_model(tmp_path, "tiny", SHAPES["tiny"].scaled(8), "q8_0")
    with working("--memory", _LIMIT) as (address, worker):
        chat = ("chat", model, "-p", PROMPT, "-n", 40, "--rpc", address, "--device", "RPC0", "--ctx", 256)
        stats = ("--placement", "cache", "--stats-json", tmp_path / "stats")
        done = run_pyhobbit(*chat, *stats, timeout=60)
        assert done.returncode == 0, done.stderr
        larger = write_model(tmp_path, "tiny", SHAPES["tiny"].scaled(16), "q8_0")
        much = ("--placement", "cache", "--device-memory", "8G")
        refused = run_pyhobbit("chat", larger, *chat[2:], *much, timeout=60)
        assert (refused.returncode, len(refused.stderr.strip().splitlines())) == (1, 1)
        assert "give a smaller --pools or --device-memory" in refused.stderr
        info = json.loads((tmp_path / "stats").read_text())
        assert 0 < info["pool_slots_high"] < info["n_all_experts"]
        status = Path(f"/proc/{worker.pid}/status").read_text()
        peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]
        assert info["pool_bytes_high"] < peak <= _LIMIT
        limits = Path(f"/proc/{worker.pid}/limits").read_text()
        assert re.search(rf"Max data size +{_LIMIT} +{_LIMIT} ", limits)


def test_a_machine_may_go_away_at_any_byte(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    """While it is connected to, a model is loaded, a prompt is read, or text is written."""
    chat = ("chat", tiny_gguf, *on_rpc.CHAT, "-q", "--device", "RPC0", "--rpc")
    with working() as (address, _):
        with relaying(address) as whole:
            done = run_pyhobbit(*chat, whole.address, timeout=60)
            assert done.returncode == 0, done.stderr
        for part in (0, 0.001, 0.1, 0.5, 0.8):
            with relaying(address, most=int(part * whole.n_bytes)) as relay:
                cut = run_pyhobbit(*chat, relay.address, timeout=60)
            assert (cut.returncode, len(cut.stderr.strip().splitlines())) == (1, 1), (part, cut.stderr)
            assert relay.address in cut.stderr
            assert done.stdout.startswith(cut.stdout.strip())
        for most in range(whole.n_bytes - 1200, whole.n_bytes, 100):  # where the last logits are asked for
            with relaying(address, most=most) as relay:
                cut = run_pyhobbit(*chat, relay.address, timeout=60)
            assert (
                cut.stdout == done.stdout
                if cut.returncode == 0
                else done.stdout.startswith(cut.stdout.strip())
            )
        for verb, n in (("inspect", ()), ("bench", ("--prompts", 16))):
            with relaying(address, most=whole.n_bytes) as relay:
                options = ("--ctx", 256, "--device", "RPC0", "--rpc", relay.address)
                cut = run_pyhobbit(verb, tiny_gguf, *n, *options, timeout=90)
            assert (cut.returncode, len(cut.stderr.strip().splitlines())) == (1, 1), (verb, cut.stderr)
            assert relay.address in cut.stderr


def test_a_link_may_be_slow_to_answer(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    chat = ("chat", tiny_gguf, *on_rpc.CHAT)
    here = run_pyhobbit(*chat)
    with working() as (address, _), relaying(address, delay_s=0.0005) as relay:
        done = run_pyhobbit(*chat, "--rpc", relay.address, "--device", "RPC0")
    assert (done.returncode, done.stdout) == (0, here.stdout), done.stderr


def test_two_machines_divide_the_experts(tiny_gguf: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    """Three processes in all; the one that goes away is named."""
    chat = ("chat", tiny_gguf, *on_rpc.CHAT, "--verbose")
    here = run_pyhobbit(*chat)
    with working() as (one, _), working() as (two, second):
        options = ("--rpc", f"{one},{two}", "--device", "RPC0,RPC1")
        done = run_pyhobbit(*chat, *options, timeout=60)
        assert (done.returncode, done.stdout) == (0, here.stdout), done.stderr
        with serving(tiny_gguf, tmp_path / "log", *options) as server:
            text = server.complete(n=24)
            with streaming(server, n_predict=400) as stream:
                second.kill()
                rest = stream.read().decode()
            assert _GONE.partition(";")[0] in rest
            assert two in server.request("/health").error
            second.wait()
            with working(port=int(two.rpartition(":")[2])):
                wait_until(lambda: server.request("/health").status == 200)
                assert server.complete(n=24) == text


def test_a_worker_tells_who_comes_and_goes(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    port = free_port()
    command = [sys.executable, "-m", "pyhobbit", "worker", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        wait_until(lambda: listens(port))
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
        (("--memory", "99999999999G"), "cannot be set"),
        (("--threads", "0"), "--threads is 0; it must be positive"),
        (("--threads", "513"), "--threads is 513; ggml computes with at most 512 threads"),
        (("--host", "300.1.1.1"), "--host 300.1.1.1 has no address of IPv4"),
        (("--host", "::1"), "--host ::1 has no address of IPv4"),
        (("--host", ""), "has no address of IPv4"),
        (("--host", "192.0.2.1"), "192.0.2.1:50052 cannot be used"),
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
