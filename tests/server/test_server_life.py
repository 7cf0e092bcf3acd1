# SPDX-License-Identifier: MIT
"""`pyhobbit serve` from start to end: ready, refused, interrupted, used for long."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import models
import pytest
from conftest import RunPyhobbit
from servers import (
    END_TIMEOUT_S,
    LONG,
    LONG_ANSWER,
    PROMPT,
    Server,
    free_port,
    growth,
    running,
    serving,
    streaming,
    wait_until,
)

from bench.harness.files import SHAPES, write_model
from pyhobbit.native.devices import has_gpu


def _port(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def test_same_greedy_text_as_chat_and_stock(tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    model = models.tiny()
    stock = [models.stock_dir() / "llama-server", "-m", model, "--ctx-size", 512]
    with running(stock, tmp_path / "stock.log") as server:
        expected = server.complete(n=48)
    with serving(model, tmp_path / "log", "--pools", "4M") as server:
        assert server.complete(n=48) == expected
        assert server.cache()["pool_slots_high"] < 48
        assert server.cache()["misses_high"] > 0
    done = run_pyhobbit("chat", model, "-p", PROMPT, "-n", 48, "--temp", 0, "--pools", "4M")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == expected.rstrip("\n")


def test_it_listens_here_alone_and_is_ready_when_healthy(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log") as server:
        assert server.complete(n=4)  # at once
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", _port(server)))  # this machine too


def test_a_client_that_leaves_frees_its_slot(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--parallel", 1, "--pools", "3M", *LONG) as server:
        for _ in range(3):
            with streaming(server):
                assert server.busy_slots() == 1
        wait_until(lambda: server.busy_slots() == 0)
        assert server.complete(n=4)
        (computed,) = re.findall(
            r"^llamacpp:tokens_predicted_total (\d+)", server.request("/metrics").text, re.M
        )
        assert int(computed) < LONG_ANSWER, "an answer was generated to its end"


@pytest.mark.parametrize("interrupt", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_it_generates(
    tiny_gguf: Path, tmp_path: Path, interrupt: signal.Signals
) -> None:
    options = ("--parallel", 1, "--pools", "3M", *LONG)
    with serving(tiny_gguf, tmp_path / "log", *options) as server, streaming(server) as answer:
        server.process.send_signal(interrupt)
        assert b"The server is shutting down" in answer.read()
        assert server.process.wait(END_TIMEOUT_S) == 0


def test_without_a_chat_template_messages_are_continued(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--pools", "3M") as server:
        assert "template  none in the file: the model continues the text" in server.log.read_text()
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16, "temperature": 0}
        answer = server.request("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
        assert answer.strip() == server.complete(n=16, temperature=0).strip()


# The main thread is asked to end where it begins to wait for tasks, and so holds the lock of their queue.
_ASKED_WITH_A_LOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

int pthread_cond_clockwait(pthread_cond_t * cond, pthread_mutex_t * mutex, clockid_t clock,
                           const struct timespec * until) {
    if (gettid() == getpid() && access("FILE", F_OK) == 0) {
        unlink("FILE");
        pthread_kill(pthread_self(), SIGTERM);
    }
    int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *) =
        dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    return real(cond, mutex, clock, until);
}
"""


def test_a_signal_ends_it_while_the_main_thread_holds_a_lock(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, library, source = (tmp_path / name for name in ("asked", "shim.so", "shim.c"))
    source.write_text(_ASKED_WITH_A_LOCK.replace("FILE", str(asked)))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with serving(tiny_gguf, tmp_path / "log", "--pools", "3M") as server:
        asked.touch()
        assert server.process.wait(END_TIMEOUT_S) == 0
    assert not asked.exists()


def test_answers_end_within_the_time_to_drain(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ("--parallel", 2, "--pools", "3M", *LONG, "--drain", 300)
    with (
        serving(tiny_gguf, tmp_path / "log", *options) as server,
        streaming(server, n_predict=1000) as answer,
    ):
        server.process.terminate()
        wait_until(lambda: server.request("/health").status == 503)
        assert "the server ends when its answers are written" in server.request("/health").error
        assert server.complete(n=4)  # a proxy has not noticed yet
        pieces = [json.loads(line[6:]) for line in answer if line.startswith(b"data:")]
        assert pieces[-1]["tokens_predicted"] == 1000
        assert server.process.wait(END_TIMEOUT_S) == 0


@pytest.mark.parametrize("again", [True, False])
def test_answers_that_take_longer_than_the_drain_end_with_a_reason(
    tiny_gguf: Path, tmp_path: Path, again: bool
) -> None:
    options = ("--parallel", 1, "--pools", "3M", *LONG, "--drain", 300 if again else 1)
    with serving(tiny_gguf, tmp_path / "log", *options) as server, streaming(server) as answer:
        server.process.terminate()
        if again:
            wait_until(lambda: server.request("/health").status == 503)
            server.process.terminate()
        assert b"The server is shutting down" in answer.read()
        assert server.process.wait(END_TIMEOUT_S) == 0


def test_a_signal_ends_it_while_it_reads_a_long_prompt(tiny_gguf: Path, tmp_path: Path) -> None:
    n = 20_000  # in one batch, which takes many seconds
    longer = ("--override-kv", f"llama.context_length=int:{n}")
    batch = ("--ctx-size", n, "--parallel", 1, "--batch-size", n)
    with (
        serving(tiny_gguf, tmp_path / "log", "--pools", "3M", *batch, *longer) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        before = server.cache()["layers_computed"]
        asked = pool.submit(server.request, "/completion", {"prompt": [65] * (n - 100), "n_predict": 1})
        wait_until(lambda: server.cache()["layers_computed"] > before)  # it computes
        assert not asked.done()
        server.process.terminate()
        assert server.process.wait(END_TIMEOUT_S) == 0
        assert asked.result().error == "The server is shutting down"


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"[1,", b'{"prompt": "a"', b"\xff\xfe"])
def test_malformed_json_is_a_bad_request(shared: Server, path: str, body: bytes) -> None:
    answer = shared.request(path, body)
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("key", ["wrong", "secre", "secret2", "SECRET"])
def test_a_wrong_key_is_refused(shared: Server, key: str) -> None:
    for path, body in (("/hobbit", None), ("/metrics", None), ("/completion", {"prompt": "a"})):
        assert shared.request(path, body, key).status == 401
    assert shared.request("/hobbit").status == 200


def test_without_a_key_nothing_but_health_is_told(shared: Server) -> None:
    for path, status in {"/hobbit": 401, "/metrics": 401, "/slots": 401, "/health": 200}.items():
        with closing(http.client.HTTPConnection("127.0.0.1", _port(shared), timeout=60)) as connection:
            connection.request("GET", path)
            assert connection.getresponse().status == status, path


def test_a_sleeping_server_keeps_its_figures_and_wakes(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ("--parallel", 1, "--pools", "3M", "--prefetch", 0, "--sleep-idle-seconds", 1)
    with serving(tiny_gguf, tmp_path / "log", *options) as server:
        text, awake = server.complete(n=8), server.cache()
        wait_until(lambda: server.request("/props").json["is_sleeping"])
        assert {**server.cache(), "rates": None} == {**awake, "rates": None}
        assert server.complete(n=8) == text
        assert server.cache()["selections_high"] < 2 * awake["selections_high"]  # counted anew


def test_an_over_long_prompt_is_a_clear_bad_request(shared: Server) -> None:
    answer = shared.request("/completion", {"prompt": PROMPT * 500})
    assert answer.status == 400
    assert "exceeds the available context size (512 tokens)" in answer.error


def test_many_requests_do_not_grow_it(shared: Server) -> None:
    assert growth(shared, 150) < 4 << 20


def test_a_signal_ends_it_while_clients_say_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with (
        serving(tiny_gguf, tmp_path / "log", "--parallel", 2, "--memory", "200M") as server,
        ExitStack() as stack,
    ):
        for number in range(300):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", _port(server))))
            client.sendall((b"", head, head + b"Content-Length: 500\r\n\r\n{")[number % 3])
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_TIMEOUT_S) == 0
        assert time.monotonic() - start < 15  # ten seconds for those that have a thread, none for the others


@pytest.fixture(scope="module")
def shared(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("life") / "log"
    with serving(
        tiny_gguf, log, "--parallel", 2, "--ctx-size", 1024, "--pools", "4M", key="secret"
    ) as server:
        yield server


def test_a_busy_port_is_an_error_before_the_model_is_loaded(
    tiny_gguf: Path, run_pyhobbit: RunPyhobbit
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = run_pyhobbit("serve", tiny_gguf, "--port", other.getsockname()[1])
    assert done.returncode == 1
    assert done.stderr.endswith(" cannot be used: Address already in use; give another --host or --port\n")


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        (("--prot", "8080"), 2, "no option --prot; did you mean --port?"),
        (("--port", "99999"), 2, "--port is 99999; it must be a number from 0 to 65535"),
        (("--port", "x"), 2, "--port is x; it must be a number"),
        (("--host", "no.such.host.invalid"), 1, "give another --host"),
        (("--ctxsize", "8080"), 2, "no option --ctxsize; did you mean --ctx?"),
        (("--set", "t1=0.9", "--set", "t2=0.5"), 2, "t1 (0.9) must not be above t2 (0.5)"),
        (("--memory", "1M", "--pools", "1M"), 1, "give one of them"),
        (("--memory", "1M"), 1, "memory budget of 1.0 MiB is too small"),
        (("--memory", "1G", "--cache-ram", "1023"), 1, "memory budget of 1.0 MiB is too small"),
        (("--memory", "1G", "--cache-ram", "1024"), 2, "leaves nothing of --memory"),
        (("--memory", "1G", "--cache-ram", "-1"), 2, "--cache-ram -1 sets no limit"),
        (("--memory", "1G", "--mmproj-url", "http://h/m.gguf"), 2, "what --mmproj-url takes is not known"),
        (("--memory", "1G", "-md", "m.gguf"), 2, "what --model-draft takes is not known"),
        (("-hf", "a/b"), 2, "both MODEL"),
        (("--drain", "-1"), 2, "--drain is -1; it must be a number of seconds from 0"),
        (("--spec-type", "draft-simple"), 2, "draft-simple drafts by another model: give --spec-draft-model"),
        (("--spec-type", "ngram-mod,draft-eagle3"), 2, "draft-eagle3 drafts by another model"),
        (("--policy", "nope"), 2, "policy is 'nope'; choose one of "),
        (("--ctx-size", "2000000000"), 1, "use a smaller --ctx"),
    ],
)
def test_errors(
    tiny_gguf: Path, run_pyhobbit: RunPyhobbit, arguments: tuple[str, ...], status: int, problem: str
) -> None:
    port = () if "--port" in arguments else ("--port", free_port())
    done = run_pyhobbit("serve", tiny_gguf, *port, *arguments)
    assert done.returncode == status
    assert problem in done.stderr
    if status == 1:
        assert len(done.stderr.splitlines()) == 1


def test_memory_is_no_remedy_for_an_absent_tier(run_pyhobbit: RunPyhobbit) -> None:
    options = ("--memory", "300M", "--set", "t1=0.5", "--port", free_port())
    done = run_pyhobbit("serve", models.tiny(), *options)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("has none: add them with pyhobbit convert, or leave t1 at 1")


@pytest.mark.parametrize(("flag", "said"), [("--version", "version:"), ("--list-devices", "devices")])
def test_some_options_need_no_model(run_pyhobbit: RunPyhobbit, flag: str, said: str) -> None:
    done = run_pyhobbit("serve", flag)
    assert done.returncode == 0
    assert said in done.stdout + done.stderr


def test_a_folder_of_models_needs_no_model(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "tiny.gguf").symlink_to(tiny_gguf)
    (folder / "notes.gguf").write_text("no model")
    command = [sys.executable, "-m", "pyhobbit", "serve", "--models-dir", folder, "--ctx-size", 512]
    with running(command, tmp_path / "log") as server:
        assert [each["id"] for each in server.request("/v1/models").json["data"]] == ["tiny"]
    said = (tmp_path / "log").read_text(errors="replace")
    assert "pyhobbit: names     tiny\n" in said
    assert f"pyhobbit: skipped   {folder / 'notes.gguf'} is not a GGUF file" in said


def test_a_model_of_a_folder_that_nobody_asks_for_frees_its_memory(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    write_model(folder, "tiny", SHAPES["tiny"], "q4_0").rename(folder / "a.gguf")
    options = ("--pools", "150M", "--ctx-size", 512, "--sleep-idle-seconds", 1)
    command = [sys.executable, "-m", "pyhobbit", "serve", "--models-dir", folder, *options]

    def state() -> str:
        return server.request("/v1/models").json["data"][0]["status"]["value"]

    with running(command, tmp_path / "log") as server:
        text = server.complete(n=64, model="a")
        (held,) = server.children("VmHWM").values()  # it may sleep already
        wait_until(lambda: state() == "sleeping")
        (left,) = server.children().values()
        assert left < held - (100 << 20)
        assert server.complete(n=64, model="a-exact") == text  # its second name wakes it


def test_the_loaded_models_of_a_folder_keep_one_bound(tiny_gguf: Path, tmp_path: Path) -> None:
    bound, folder = 256 << 20, tmp_path / "models"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.gguf").symlink_to(tiny_gguf)
    options = ("--memory", bound, "--models-max", 2, "--ctx-size", 512)
    command = [sys.executable, "-m", "pyhobbit", "serve", "--models-dir", folder, *options]
    with running(command, tmp_path / "log") as server:
        texts = [server.complete(n=8, model=name) for name in ("a", "b")]
        assert texts[0] == texts[1]
        held = server.children()
        assert len(held) == 2
        assert all(f"hobbit.memory=int:{bound // 2}" in command for command in held)
        assert sum(held.values()) < bound
    said = (tmp_path / "log").read_text(errors="replace")
    assert "memory    up to 256.0 MiB by --memory, 128.0 MiB for each model" in said


def test_each_model_of_a_folder_has_its_own_counters(
    tiny_gguf: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("a", "b", "c"):
        (folder / f"{name}.gguf").symlink_to(tiny_gguf)
    options = ("--pools", "3M", "--prefetch", 0, "--models-max", 2, "--ctx-size", 512, "--parallel", 1)
    command = [sys.executable, "-m", "pyhobbit", "serve", "--models-dir", folder, *options]
    with running(command, tmp_path / "log") as server:
        for name, n in (("a", 4), ("b", 24)):
            server.complete(n=n, model=name, ignore_eos=True)
        caches = {name: server.request(f"/hobbit?model={name}").json for name in ("a", "b")}
        for name, cache in caches.items():
            assert cache["cached"]
            metrics = server.request(f"/metrics?model={name}").text
            misses = re.search(r'^hobbit_misses_total\{precision="high"\} (.*)$', metrics, re.MULTILINE)
            assert misses
            assert float(misses[1]) == cache["misses_high"]
        a, b = caches["a"], caches["b"]
        more = 20 * a["n_layers"] * a["n_experts_used"]  # tokens that were decoded, one by one
        assert b["selections_high"] - a["selections_high"] == more
        unloaded = server.request("/hobbit?model=c&autoload=false")
        assert (unloaded.status, unloaded.error) == (400, "model is not loaded")
        unknown = server.request("/hobbit?model=d")
        assert (unknown.status, unknown.error) == (400, "model 'd' not found")
        unnamed = server.request("/hobbit")
        assert (unnamed.status, unnamed.error) == (400, "model name is missing from the request")
        states = {each["id"]: each["status"]["value"] for each in server.request("/v1/models").json["data"]}
        assert states == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        shown = run_pyhobbit("top", server.url, "--once", "--model", "b")
        assert "no expert was used" in shown.stdout, shown.stderr  # by nobody, meanwhile
        for which, said in (((), "it has several models"), (("--model", "c"), "the model c is not loaded")):
            assert said in run_pyhobbit("top", server.url, "--once", *which).stderr


def test_port_0_takes_a_free_one(tiny_gguf: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "pyhobbit", "serve", str(tiny_gguf), "--port", "0", "--ctx-size", "512"]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            wait_until(lambda: "listening on" in log.read_text())
        finally:
            process.terminate()
    found = re.search(r"listening on http://127.0.0.1:(\d+)", log.read_text())
    assert found
    assert int(found[1]) > 0


def test_a_port_may_be_shared(tiny_gguf: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        command = [sys.executable, "-m", "pyhobbit", "serve", tiny_gguf, "--reuse-port", "--ctx-size", 512]
        with running(command, tmp_path / "log", port=other.getsockname()[1]) as server:
            assert server.complete(n=2)


def test_a_missing_model_is_named(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("serve", tiny_gguf.with_name("tiny2.gguf"), "--port", free_port())
    assert done.returncode == 1
    assert f"did you mean {tiny_gguf}?" in done.stderr


def test_a_low_tier_that_lies_idle_is_mentioned(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    ends_early = ("--port", free_port(), "--ctx-size", 512, "--chat-template-file", "/nowhere")
    done = run_pyhobbit("serve", tiny_gguf, "--pools", "4M", *ends_early)
    assert "pyhobbit: the low tier is not used: start with --quality small-loss\n" in done.stderr
    for used in (("--pools", "4M", "--set", "t1=0.6"), ("--pools", "60M")):
        assert "low tier" not in run_pyhobbit("serve", tiny_gguf, *used, *ends_early).stderr


def test_options_of_a_model_that_only_chat_takes_are_told(
    tiny_gguf: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    (model := tmp_path / "m.gguf").symlink_to(tiny_gguf)
    model.with_suffix(".toml").write_text('temp = 0.5\nsystem = "x"\nthink = "off"\n')
    done = run_pyhobbit("serve", model, "--port", free_port(), "--chat-template-file", "/nowhere")
    told = r"m\.toml sets temp, system, think; system and think are for chat, and a client's requests have"
    assert re.search(told, done.stderr)


def test_what_is_served_is_said_first(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    port = free_port()
    ends_early = ("--port", port, "--ctx-size", 512, "--chat-template-file", "/nowhere")
    stderr = run_pyhobbit("serve", tiny_gguf, "--memory", "1G", "--set", "t1=0.6", *ends_early).stderr
    said = dict(re.findall(r"^pyhobbit: (\w+) +(.*)", stderr, re.MULTILINE))
    assert said["model"].startswith("tiny.gguf, ")
    assert said["model"].endswith(", context 512 tokens")
    assert ("GPU" in said) == has_gpu()
    assert said["memory"].startswith("up to 1.0 GiB by --memory; ")
    assert re.match(r"high all 48 \(.*\), low all 48 \(.*\), on the CPU", said["experts"])
    assert said["precision"] == "t1 0.6, t2 1"
    assert f"http://127.0.0.1:{port}/v1" in said["address"]
    assert said["slots"] == "4, which share the context"
    smaller = run_pyhobbit("serve", tiny_gguf, "--memory", "1G", "--cache-type-k", "q8_0", *ends_early).stderr
    assert re.search(r"^pyhobbit: experts +all 48 ", smaller, re.MULTILINE)
    other = run_pyhobbit("serve", tiny_gguf, "--ubatch-size", 32, *ends_early).stderr.splitlines()
    assert other[0] == "pyhobbit: model     tiny.gguf"
    assert other[1].startswith("pyhobbit: address   http")


def test_a_model_is_called_by_its_file(tiny_gguf: Path, tmp_path: Path) -> None:
    for options, name in (((), "tiny"), (("--alias", "mine"), "mine")):
        with serving(tiny_gguf, tmp_path / "log", "--pools", "6M", *options) as server:
            assert [each["id"] for each in server.request("/v1/models").json["data"]] == [name]


def test_the_exit_status_is_llama_servers(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("serve", tiny_gguf, "--port", free_port(), "--chat-template-file", "/nowhere")
    assert done.returncode == 1
    assert "/nowhere" in done.stderr
