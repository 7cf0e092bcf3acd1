# SPDX-License-Identifier: MIT
"""A server under mixed load: memory flat, counters that add up, latency at the end as at the start.

    python tests/server/soak.py [--minutes M]

Clients keep four slots busy: completions and chats, streamed or not, with thresholds of their own, malformed
bodies, and streams that are left after a few tokens. The time is divided into quarters. Prints a line for
each, and exits with 1 where a check fails.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import models
import servers
from servers import Server

N_CLIENTS = 5  # one more than slots
MAX_GROWTH = 6 << 20  # bytes from the second quarter to the last
MAX_SLOWER = 1.5  # median latency of the last quarter by that of the second
PERIOD_S = 2.0
TIMEOUT_S = 1800  # seconds for a request, longer than a machine may be suspended


class Load:
    """Requests until stop() and what became of them."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.latencies: list[tuple[float, float]] = []  # (when, seconds) of the same request
        self.counts = {"answered": 0, "cancelled": 0}
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(N_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _client(self, seed: int) -> None:
        numbers = random.Random(seed)
        while not self._ended.is_set():
            try:
                self._one(numbers)
            except Exception as e:  # a soak reports every error
                self.failures.append(f"{type(e).__name__}: {e}")
                return

    def _one(self, numbers: random.Random) -> None:
        kind = numbers.random()
        if kind < 0.2:
            self._leave(numbers)
        elif kind < 0.5:
            start = time.monotonic()
            self._server.complete(n=8)
            self.latencies.append((start, time.monotonic() - start))
        else:
            servers.ask(self._server, numbers)
        with self._lock:
            self.counts["cancelled" if kind < 0.2 else "answered"] += 1

    def _leave(self, numbers: random.Random) -> None:
        body = {"prompt": f"# {numbers.random()}", "n_predict": 200, "stream": True, "ignore_eos": True}
        with closing(
            http.client.HTTPConnection(self._server.url.removeprefix("http://"), timeout=TIMEOUT_S)
        ) as connection:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            for _ in range(numbers.randrange(1, 6)):
                answer.readline()


def sums(cache: dict[str, float]) -> list[str]:
    """Contradictions in the counters."""
    wrong = []
    for name in ("hits", "misses"):
        if sum(cache[f"{name}_by_layer"]) != cache[f"{name}_high"] + cache[f"{name}_low"]:
            wrong.append(f"{name} by layer")
    if cache["predicted_right"] > cache["predicted"] or cache["prefetched_used"] > cache["prefetched"]:
        wrong.append("more predictions right than made")
    if cache["bytes_prefetched"] > cache["bytes_read"] or cache["reads"] == 0:
        wrong.append("reads")
    if cache["evictions"] > cache["misses_high"] + cache["misses_low"] + cache["prefetched"]:
        wrong.append("more evictions than came")
    if cache["stall_s"] > cache["compute_s"]:
        wrong.append("stalls longer than what they are a part of")
    return wrong


def soak(server: Server, seconds: float) -> list[str]:
    """Prints a line for each quarter; returns what failed."""
    problems: list[str] = []
    memory: list[list[int]] = []
    load, ends = Load(server), list[float]()
    for quarter in range(4):
        memory.append([])
        for _ in range(max(1, round(seconds / 4 / PERIOD_S))):  # not by the clock: a machine may be suspended
            time.sleep(PERIOD_S)
            memory[-1].append(server.memory())
            if load.failures:
                break
        ends.append(time.monotonic())
        if load.failures:
            break
        problems += sums(server.cache())
        print(f"quarter {quarter + 1}: {max(memory[-1]) >> 20} MiB, {load.counts}", flush=True)
    load.stop()
    if load.failures:
        return problems + load.failures
    time.sleep(1)
    if server.busy_slots():
        problems.append("a slot is busy after the last request")
    if max(memory[3]) - max(memory[1]) > MAX_GROWTH:
        problems.append(f"memory grew by {(max(memory[3]) - max(memory[1])) >> 10} KiB")
    medians = [
        statistics.median(s for when, s in load.latencies if begin <= when < end)
        for begin, end in pairwise([0.0, *ends])
    ]
    print("median latency of 8 tokens by quarter, s: " + " ".join(f"{s:.2f}" for s in medians))
    if medians[3] > MAX_SLOWER * medians[1]:
        problems.append("the last quarter is slower than the second")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    args = parser.parse_args()
    servers.REQUEST_TIMEOUT_S = TIMEOUT_S
    options = ("--pools", "5M", "--set", "t1=0.6", "--set", "t2=0.95", "--parallel", 4, "--ctx-size", 4096)
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.serving(models.tiny_tiers("q8_0", "q4_0"), Path(folder) / "log", *options) as server,
    ):
        problems = soak(server, 60 * args.minutes)
    print("\n".join(problems) or "memory flat, counters add up, latency as before")
    return min(1, len(problems))


if __name__ == "__main__":
    sys.exit(main())
