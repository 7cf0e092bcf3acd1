# SPDX-License-Identifier: MIT
"""Two servers under mixed load: texts exact, memory and descriptors flat, counters that add up.

    python tests/server/soak.py [--minutes M]

Clients keep the eight slots of a server with drafts busy, each on a connection that is kept alive:
completions and chats, streamed or not, with thresholds of their own, malformed bodies, slots that are saved
and restored, and answers that are left at any moment. A second server embeds texts. The time is divided
into quarters. Prints a line for each, and exits with 1 where a check fails.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import models
import servers
from servers import PROMPT, Server

N_SLOTS = 8
N_CLIENTS = N_SLOTS + 1
# Beside others' rows the last bits differ, as in stock; below t1 1 what is resident decides (docs/server.md).
EXACT = {"alone": True, "t1": 1}
N_SAVED = 4  # files of slots
PROMPTS = [
    PROMPT,
    "class Node:\n",
    "import os\n" * 9,
    "# a\n" * 40,
    "def write_file(path, text):\n",
    "x = [\n",
]
MAX_GROWTH = 6 << 20  # bytes from the second quarter to the last
MAX_SLOWER = 1.5  # median latency of the last quarter by that of the second
PERIOD_S = 2.0
KEPT_S = 0.5  # eight times that, and the server closes a connection without a request after 5 s
TIMEOUT_S = 1800  # seconds for a request, longer than a machine may be suspended


class Load:
    """Requests until stop() and what became of them."""

    def __init__(self, server: Server, embedder: Server) -> None:
        self._server, self._embedder = server, embedder
        self._texts = {prompt: server.complete(prompt, n=8, hobbit=EXACT) for prompt in PROMPTS}
        self._vectors = {prompt: self._vector(prompt) for prompt in PROMPTS}
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.latencies: list[tuple[float, float]] = []  # (when, seconds) of the same request
        self.counts: Counter[str] = Counter()
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
        kinds = {self._leave: 4, self._exact: 5, self._ask: 5, self._slot: 2, self._embed: 2}
        while not self._ended.is_set():
            try:
                with closing(self._server.connection()) as connection:  # kept alive for some requests
                    for do in numbers.choices([*kinds], [*kinds.values()], k=numbers.randrange(1, 9)):
                        start = time.monotonic()
                        do(numbers, connection)
                        if do in (self._ask, self._embed) and time.monotonic() - start > KEPT_S:
                            connection.close()  # it was idle; the next request opens another one
                        with self._lock:
                            self.counts[do.__name__.strip("_")] += 1
                        if do == self._leave or self._ended.is_set():
                            break
            except Exception as e:  # a soak reports every error
                self.failures.append(f"{type(e).__name__}: {e}")
                return

    def _post(self, connection: http.client.HTTPConnection, path: str, body: object) -> tuple[int, Any]:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            return answer.status, json.loads(answer.read())

    def _exact(self, numbers: random.Random, connection: http.client.HTTPConnection) -> None:
        prompt, start = numbers.choice(PROMPTS), time.monotonic()
        body: dict[str, object] = {"prompt": prompt, "n_predict": 8, "temperature": 0, "hobbit": EXACT}
        body["cache_prompt"] = numbers.random() < 0.5
        status, answer = self._post(connection, "/completion", body)
        if (status, answer.get("content")) != (200, self._texts[prompt]):
            raise ValueError(f"{prompt!r} gave {status}, {answer}; at first {self._texts[prompt]!r}")
        if prompt == PROMPT:
            self.latencies.append((start, time.monotonic() - start))

    def _ask(self, numbers: random.Random, _: http.client.HTTPConnection) -> None:
        servers.ask(self._server, numbers)

    def _leave(self, numbers: random.Random, connection: http.client.HTTPConnection) -> None:
        """Closes the connection before, while or after the answer begins."""
        body = {"prompt": f"# {numbers.random()}", "n_predict": 200, "stream": True, "ignore_eos": True}
        body["stream"] = numbers.random() < 0.8
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        if body["stream"] and numbers.random() < 0.8:
            answer = connection.getresponse()
            for _ in range(numbers.randrange(1, 6)):
                answer.readline()
        else:
            time.sleep(numbers.random() / 4)

    def _slot(self, numbers: random.Random, connection: http.client.HTTPConnection) -> None:
        """Saves, restores or erases a slot; a name that was not saved yet is an error of 400."""
        action = numbers.choice(["save", "restore", "erase"])
        path = f"/slots/{numbers.randrange(N_SLOTS)}?action={action}"
        status, answer = self._post(connection, path, {"filename": f"s{numbers.randrange(N_SAVED)}"})
        if status != 200 and (action, status) != ("restore", 400):
            raise ValueError(f"{path}: {status}, {answer}")

    def _vector(self, prompt: str) -> list[float]:
        answer = self._embedder.request("/v1/embeddings", {"input": prompt})
        return answer.json["data"][0]["embedding"]

    def _embed(self, numbers: random.Random, _: http.client.HTTPConnection) -> None:
        prompt = numbers.choice(PROMPTS)
        if self._vector(prompt) != self._vectors[prompt]:
            raise ValueError(f"{prompt!r} has another vector than at first")


def n_files(*of: Server) -> list[int]:
    """Open descriptors of each."""
    return [len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) for server in of]


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


def soak(server: Server, embedder: Server, seconds: float) -> list[str]:
    """Prints a line for each quarter; returns what failed."""
    server.complete(), embedder.request("/v1/embeddings", {"input": PROMPT})
    files, peaks = n_files(server, embedder), [server.peak() >> 20, embedder.peak() >> 20]
    print(f"start: peaks of {peaks} MiB, {files} descriptors", flush=True)
    problems: list[str] = []
    memory: list[list[int]] = []
    load, ends = Load(server, embedder), list[float]()
    for quarter in range(4):
        memory.append([])
        for _ in range(max(1, round(seconds / 4 / PERIOD_S))):  # not by the clock: a machine may be suspended
            time.sleep(PERIOD_S)
            memory[-1].append(server.memory() + embedder.memory())
            if load.failures:
                break
        ends.append(time.monotonic())
        if load.failures:
            break
        problems += sums(server.cache())
        print(f"quarter {quarter + 1}: {max(memory[-1]) >> 20} MiB, {dict(load.counts)}", flush=True)
    load.stop()
    if load.failures:
        return problems + load.failures
    time.sleep(1)
    if server.busy_slots():
        problems.append("a slot is busy after the last request")
    if max(memory[3]) - max(memory[1]) > MAX_GROWTH:
        problems.append(f"memory grew by {(max(memory[3]) - max(memory[1])) >> 10} KiB")
    peaks = [server.peak() >> 20, embedder.peak() >> 20]
    before, files = sum(files), n_files(server, embedder)
    for _ in range(20):  # the last clients have left just now
        if sum(files := n_files(server, embedder)) <= before:
            break
        time.sleep(1)
    else:
        folders = (Path(f"/proc/{each.process.pid}/fd") for each in (server, embedder))
        problems.append(
            f"descriptors are left open: {[*map(os.readlink, chain(*map(Path.iterdir, folders)))]}"
        )
    print(f"end: {sum(load.counts.values())} requests, peaks of {peaks} MiB, {files} descriptors")
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
    options = ("--pools", "5M", "--set", "t1=0.6", "--set", "t2=0.95", "--ctx-size", 8192)
    drafts = ("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", 3)
    slots = ("--parallel", N_SLOTS, "--slot-save-path")
    # One slot: beside the rows of others a vector differs, as in stock.
    embeds = ("--pools", "5M", "--embeddings", "--pooling", "mean", "--parallel", 1)
    model = models.tiny_tiers("q8_0", "q4_0")
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.serving(model, Path(folder) / "log", *options, *drafts, *slots, f"{folder}/") as server,
        servers.serving(models.tiny(), Path(folder) / "embedder.log", *embeds) as embedder,
    ):
        problems = soak(server, embedder, 60 * args.minutes)
    print(
        "\n".join(problems) or "texts exact, memory and descriptors flat, counters add up, latency as before"
    )
    return min(1, len(problems))


if __name__ == "__main__":
    sys.exit(main())
