# SPDX-License-Identifier: MIT
"""Servers as a place where arms run: stock llama-server and pyhobbit serve, in equal memory.

Clients send a prompt at once, and each reads a stream.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from socket import socket
from statistics import median
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from bench.harness import system
from bench.harness.arms import SERVER_ARMS
from bench.harness.runner import ArmError, BenchConfig, Host, Record, Turn
from bench.harness.trace import random_tokens
from pyhobbit.model.gguf_file import read_gguf

_CONTEXT = 1024  # tokens of each client
_START_S, _ANSWER_S = 900, 1800


@dataclass(frozen=True)
class Server:
    """One that answers. cgroup: counts its memory."""

    port: int
    process: "subprocess.Popen[bytes]"
    cgroup: system.Cgroup

    def ask(self, prompt: Sequence[int], n_tokens: int) -> list[float]:
        """Seconds of the clock at the request, and at each of n_tokens as they come. Raises ArmError."""
        body = {"prompt": prompt, "n_predict": n_tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        text = json.dumps({**body, "cache_prompt": False, "return_tokens": True})
        times = [time.perf_counter()]
        try:
            with self._answer("/completion", text.encode()) as lines:
                for line in lines:
                    if b'"error"' in line:
                        raise ArmError(f"the server answers: {line[:300]!r}")
                    tokens = json.loads(line[6:]).get("tokens", ()) if line.startswith(b"data: {") else ()
                    times += [time.perf_counter()] * len(tokens)
        except OSError as e:
            raise ArmError(f"the server hung up: {e}") from e
        if len(times) == 1:
            raise ArmError("the server sent no token")
        return times

    def get(self, path: str) -> Any:
        with self._answer(path) as answer:
            return json.load(answer)

    def _answer(self, path: str, body: bytes | None = None) -> Any:
        request = Request(f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json"})
        return urlopen(request, timeout=_ANSWER_S)

    def counters(self, has_cache: bool) -> np.ndarray:
        """Bytes from the disk, hits and misses."""
        cache = self.get("/hobbit") if has_cache else {}
        uses = (sum(cache.get(f"{of}_{tier}", 0) for tier in ("high", "low")) for of in ("hits", "misses"))
        return np.array([system.bytes_from_disk(self.process.pid), *uses])

    def at_once(self, prompts: Sequence[list[int]], n_tokens: int, has_cache: bool) -> Record:
        """The figures of clients that send these prompts at the same time."""
        before, start = self.counters(has_cache), time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: self.ask(prompt, n_tokens), prompts))
        n_read, hits, misses = (self.counters(has_cache) - before).tolist()
        n_all = sum(len(times) - 1 for times in answers)
        gaps = [after - since for times in answers for since, after in pairwise(times[1:])]
        return {
            "clients": len(prompts),
            "tokens_per_second": n_all / (max(times[-1] for times in answers) - start),
            "first_last_s": max(times[1] - times[0] for times in answers),
            "gap_s": median(gaps), "gap_95_s": float(np.percentile(gaps, 95)),
            "disk_bytes_per_token": n_read / n_all,
            "hit_rate": hits / max(1, hits + misses) if has_cache else None,
            "peak_bytes": self.cgroup.peak(),
        }  # fmt: skip


class Served(Host):
    """Servers that these numbers of clients ask at once."""

    arms = SERVER_ARMS
    usual = MappingProxyType({"limits": (0.25, 0.5, 1.0), "reps": 3, "prompts": (16,), "n_tokens": 48})

    def __init__(self, clients: Sequence[int]) -> None:
        self._clients = clients

    def head(self, config: BenchConfig) -> Record:
        with system.memory_cgroup(None):  # also without a limit it counts the memory
            return super().head(config)

    def measure(self, config: BenchConfig, turn: Turn, limit: int | None, _routes: Path) -> Iterator[Record]:
        with self._serving(config, turn, limit) as server:
            draw = random_tokens(len(read_gguf(config.model).metadata["tokenizer.ggml.tokens"].value()))
            prompts = [list(islice(draw, config.prompts[0])) for _ in range(max(self._clients))]
            for n in self._clients:
                yield server.at_once(prompts[:n], config.n_tokens, turn.arm.build == "ours")

    @contextmanager
    def _serving(self, config: BenchConfig, turn: Turn, limit: int | None) -> Iterator[Server]:
        """The arm's server once it answers. Raises ArmError."""
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            port, n = free.getsockname()[1], max(self._clients)
        program = [str(config.stock.resolve() / "llama-server")]
        options = ["-m", str(config.model.absolute()), "--kv-unified", "--port", str(port)]
        options += ["--parallel", str(n), "--ctx-size", str(_CONTEXT * n)]
        if turn.arm.build == "ours":
            program = [sys.executable, "-m", "pyhobbit", "serve"]
            options += ["--memory", str(config.usable(limit or 0)), "--quality", "lossless"]
        elif turn.arm.mmap:
            options += ["--no-repack"]  # a second layout would not be mapped
        system.drop_cached(config.parts)
        with (
            system.memory_cgroup(limit) as cgroup,
            TemporaryFile() as log,
            subprocess.Popen(cgroup.joining(program + options), stdout=log, stderr=log, cwd="/") as process,
        ):
            try:
                server = Server(port, process, cgroup)
                deadline = time.monotonic() + _START_S
                while not _answers(server):
                    if process.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        last = log.read().decode(errors="replace").strip().splitlines()[-2:]
                        last = last or [f"it ended with status {process.poll()}"]  # -9: too little memory
                        raise ArmError(f"the server does not get ready: {' / '.join(last)}")
                    time.sleep(0.3)
                yield server
            finally:
                process.kill()


def _answers(server: Server) -> bool:
    try:
        server.get("/health")
    except OSError:
        return False
    return True
