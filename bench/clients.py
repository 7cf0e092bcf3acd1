# SPDX-License-Identifier: MIT
"""Measures servers with several clients at once: stock llama.cpp's and pyhobbit serve, in equal memory.

    python -m bench.clients MODEL.gguf --clients 1 2 4 8 --limits 0.25 0.5 1 --reps 3

Each server runs in a memory cgroup with an empty page cache. Every client sends a prompt of 16 tokens and
reads a stream of 48. Texts are greedy, and each is compared with the one that its client gets alone: kernels
that add in another order for several tokens let near ties of random weights fall otherwise, in stock as well.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from itertools import islice, pairwise
from pathlib import Path
from socket import socket
from statistics import median
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from bench.harness import runner, system
from bench.harness.arms import BY_NAME
from bench.harness.table import markdown, number
from bench.harness.trace import random_tokens
from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import read_gguf

# stock's server in memory without a limit, or mapped under each; ours under each
ARMS = ("memory", "mapped", "ours")
_PROMPT = 16  # tokens
_USES = ("hits", "misses")
_START_S, _ANSWER_S = 900, 1800
# columns by the record's key, with unit and precision
COLUMNS = {
    "token/s": ("rate", 1, ".1f"),
    "first, s": ("first_s", 1, ".2f"),
    "first 95 %": ("first_95_s", 1, ".2f"),
    "last": ("first_last_s", 1, ".2f"),
    "between, ms": ("gap_s", 1e3, ".0f"),
    "between 95 %": ("gap_95_s", 1e3, ".0f"),
    "MB/token": ("mb_per_token", 1, ".1f"),
    "hits": ("hits", 1, ".0%"),
    "same texts": ("same", 1, ".0f"),
    "peak, MB": ("peak", 1e-6, ".0f"),
}
Record = dict[str, Any]


@dataclass
class Heard:
    """One answer. asked, times: seconds of the clock at the request and at each token."""

    asked: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Server:
    """One that answers. cgroup: counts its memory."""

    port: int
    process: "subprocess.Popen[bytes]"
    cgroup: system.Cgroup

    def ask(self, prompt: Sequence[int], n_tokens: int) -> Heard:
        """Reads n_tokens as they come. Raises HobbitError."""
        body = {"prompt": prompt, "n_predict": n_tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        text = json.dumps({**body, "cache_prompt": False, "return_tokens": True})
        connection = HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        heard = Heard(time.perf_counter())
        try:
            connection.request("POST", "/completion", text, {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if b'"error"' in line:
                    raise HobbitError(f"the server answers: {line[:300]!r}")
                tokens = json.loads(line[6:]).get("tokens", ()) if line.startswith(b"data: {") else ()
                heard.tokens += tokens
                heard.times += [time.perf_counter()] * len(tokens)
        except OSError as e:
            raise HobbitError(f"the server hung up: {e}") from e
        finally:
            connection.close()
        if not heard.tokens:
            raise HobbitError("the server sent no token")
        return heard

    def together(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Heard]:
        """The answers to prompts that are sent at the same time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, n_tokens), prompts))

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=_ANSWER_S) as answer:
            return json.load(answer)


def at_once(
    server: Server, arm: str, prompts: Sequence[list[int]], n_tokens: int, alone: Sequence[Any]
) -> Record:
    """The figures of clients at the same time. alone: the tokens that each one gets alone."""

    def counters() -> np.ndarray:
        cache = server.get("/hobbit") if arm == "ours" else {}
        hits, misses = (sum(cache.get(f"{name}_{tier}", 0) for tier in ("high", "low")) for name in _USES)
        return np.array([system.bytes_from_disk(server.process.pid), hits, misses])

    before, start = counters(), time.perf_counter()
    heard = server.together(prompts, n_tokens)
    n_read, hits, misses = (counters() - before).tolist()
    n_all = sum(len(each.tokens) for each in heard)
    firsts = [each.times[0] - each.asked for each in heard]
    gaps = [after - since for each in heard for since, after in pairwise(each.times)]
    return {
        "rate": n_all / (max(each.times[-1] for each in heard) - start),
        "first_s": median(firsts), "first_95_s": float(np.percentile(firsts, 95)),
        "first_last_s": max(firsts),
        "gap_s": median(gaps), "gap_95_s": float(np.percentile(gaps, 95)),
        "mb_per_token": n_read / 1e6 / n_all,
        "hits": hits / max(1, hits + misses) if arm == "ours" else None,
        "same": sum(each.tokens == own for each, own in zip(heard, alone, strict=False)),
    }  # fmt: skip


def measure(args: argparse.Namespace, arm: str, limit: float | None, alone: list[Any]) -> Iterator[Record]:
    """One server's figures by the number of clients. alone: for at_once(); the first call fills it."""
    with serving(args, arm, limit) as server:
        draw = random_tokens(args.n_vocab)
        prompts = [list(islice(draw, _PROMPT)) for _ in range(max(args.clients))]
        if not alone:
            alone += [server.together([prompt], args.tokens)[0].tokens for prompt in prompts]
            server.together([list(islice(draw, 8)) for _ in prompts], 1)  # no slot keeps these
        for n in args.clients:
            found = at_once(server, arm, prompts[:n], args.tokens, alone)
            yield {"clients": n, **found, "peak": server.cgroup.peak()}


@contextmanager
def serving(args: argparse.Namespace, arm: str, share: float | None) -> Iterator[Server]:
    """The arm's server once it answers. Raises HobbitError."""
    limit = None if share is None else int(args.config.model_bytes * share)
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(args.stock / "llama-server")]
    options = ["-m", str(args.model), "--kv-unified", "--port", str(port)]
    options += ["--parallel", str(max(args.clients)), "--ctx-size", str(args.ctx)]
    if arm == "ours":
        command = [sys.executable, "-m", "pyhobbit", "serve"]
        options += ["--memory", str(args.config.usable(limit or 0)), "--quality", "lossless"]
    elif arm == "mapped":
        options += ["--no-repack"]  # a second layout would not be mapped
    system.drop_cached(args.config.parts)
    with (
        system.memory_cgroup(limit) as cgroup,
        TemporaryFile() as log,
        subprocess.Popen(cgroup.joining([*command, *options]), stdout=log, stderr=log, cwd="/") as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        server = Server(port, process, cgroup)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                server.get("/health")
                break
            except OSError as e:
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    last = log.read().decode(errors="replace").strip().splitlines()[-2:]
                    last = last or [f"it ended with status {process.poll()}"]  # -9: the memory was not enough
                    raise HobbitError(f"the server does not get ready: {' / '.join(last)}") from e
                time.sleep(0.3)
        yield server


def run(args: argparse.Namespace, tell: Callable[[Record], object]) -> list[Record]:
    """All repetitions, each told at once; a server that fails gives a record with an "error"."""
    records: list[Record] = []
    alone: dict[tuple[str, float | None], list[Any]] = {}
    turns = [(arm, limit) for arm in args.arms for limit in ([None] if arm == "memory" else args.limits)]
    for repetition, (arm, limit) in ((n, turn) for n in range(args.reps) for turn in turns):
        head = {"kind": "result", "arm": arm, "limit": limit, "repetition": repetition}
        try:
            for found in measure(args, arm, limit, alone.setdefault((arm, limit), [])):
                records.append(head | found)
                tell(records[-1])
        except HobbitError as e:
            records.append(head | {"clients": 0, "error": str(e)})
            tell(records[-1])
    return records


def table(records: Sequence[Record]) -> str:
    """Medians of the repetitions, one row for each arm, limit and number of clients."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for each in records:
        key = (each["arm"], number(each["limit"], ".0%"), str(each["clients"]))
        groups.setdefault(key, []).append(each)
    rows: list[Mapping[str, str]] = []
    for key, group in groups.items():
        cells = dict(zip(("arm", "limit", "clients"), key, strict=True))
        for title, (name, scale, how) in COLUMNS.items():
            if values := [each[name] for each in group if each.get(name) is not None]:
                cells[title] = number(median(values), how, scale)
        rows.append(cells)
    return "\n".join(markdown(rows))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the model's size and vocabulary. Raises HobbitError, SystemExit."""
    parser = system.option_parser(__doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="a GGUF")
    add("--clients", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="clients at once")
    add("--limits", type=float, nargs="+", default=[0.25, 0.5, 1.0], metavar="F", help="shares of the file")
    add("--arms", nargs="+", choices=ARMS, default=ARMS, help="stock in memory, stock under limits, ours")
    add("--reps", type=int, default=3, metavar="N", help="repetitions, with medians (default: %(default)s)")
    add("--tokens", type=int, default=48, metavar="N", help="tokens of an answer (default: %(default)s)")
    add("--ctx", type=int, default=8192, metavar="N", help="context of all clients (default: %(default)s)")
    stock = runner.BenchConfig.stock
    add("--stock", type=Path, default=stock, metavar="DIR", help="programs of make stock")
    system.add_output(parser)
    args = parser.parse_args(arguments)
    if min(*args.clients, args.reps, args.tokens) <= 0 or not all(0 < share <= 1 for share in args.limits):
        parser.error("numbers must be positive, and limits shares up to 1")
    runner.require_file(args.model)
    if {*args.arms} != {"ours"} and not (args.stock / "llama-server").exists():
        raise HobbitError(f"{args.stock} has no llama-server: run make stock, or give --arms ours")
    args.model = args.model.absolute()
    args.config = runner.BenchConfig(args.model, (BY_NAME["ours"],), tuple(args.limits), reps=args.reps)
    args.n_vocab = len(read_gguf(args.model).metadata["tokenizer.ggml.tokens"].value())
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a server failed."""
    try:
        args = parsed(arguments)
        out = system.Output(args.output, args.model.stem)
        out.line(runner.description(args.config))
        with system.terminable():  # ends the server as well
            records = run(args, out.line)
        out.table(table(records))
    except HobbitError as e:
        print(f"clients: {e}", file=sys.stderr)
        return 1
    for each in records:
        if "error" in each:
            print(f"clients: {each['arm']} at {each['limit']}: {each['error']}", file=sys.stderr)
    return int(any("error" in each for each in records))


if __name__ == "__main__":
    sys.exit(main())
