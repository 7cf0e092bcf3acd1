# SPDX-License-Identifier: MIT
"""Kills the worker of a server under load at random, again and again, and looks at every answer.

    python tests/device/kills.py [--kills 20] [--seed 1] [MODEL]

Four clients ask, streamed or not, and compare the texts with those of one machine. A kill comes at any time
after the worker has come back: while the model is loaded again, while a prompt is read, or while text is
written. Exits with 1 where a text was wrong, a request failed that was not running, or a process is left.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import uuid
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import models  # noqa: E402
from servers import Server, free_port, serving, wait_until, working  # noqa: E402

_TEXTS = ("def read_file(path):\n", "import os\n\n", "class Reader:\n", "# a list of names\n" * 40)
_MOST_TOKENS = 200
_GREEDY = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
_MARK = "HOBBIT_KILLS"


@dataclass(frozen=True)
class Asked:
    """A request. start, end: seconds.  result: "right", "wrong", "away" (the status is 503) or the error."""

    start: float
    end: float
    result: str


@dataclass(frozen=True)
class Kill:
    """A kill and the worker's return, in seconds."""

    at: float
    back: float


class Clients:
    """Four clients, each of which sends requests one after the other until the block ends."""

    def __init__(self, server: Server, right: dict[str, str], seed: int) -> None:
        self.asked: list[Asked] = []
        self._server, self._right = server, right
        self._ended = threading.Event()
        numbers = [random.Random(1000 * seed + n) for n in range(4)]
        self._threads = [threading.Thread(target=self._go_on, args=(each,)) for each in numbers]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def succeeded_since(self, time_s: float) -> bool:
        return any(each.result == "right" and each.start > time_s for each in self.asked)

    def _go_on(self, numbers: random.Random) -> None:
        while not self._ended.is_set():
            text, n, streams = (
                numbers.choice(_TEXTS),
                numbers.randint(1, _MOST_TOKENS),
                numbers.random() < 0.5,
            )
            start = time.monotonic()
            result = self._result(text, n, streams)
            self.asked.append(Asked(start, time.monotonic(), result))
            time.sleep(0.1 if result == "away" else 0)

    def _result(self, text: str, n: int, streams: bool) -> str:
        alone = {"hobbit": {"alone": True}}  # with AVX2, several texts in a pass may have other bits
        body = {"prompt": text, "n_predict": n, "stream": streams, **_GREEDY, **alone}
        with closing(self._server.connection()) as connection:
            try:
                connection.request("POST", "/completion", json.dumps(body))
                answer = connection.getresponse()
                if answer.status != 200:
                    said = json.loads(answer.read())["error"]
                    return "away" if answer.status == 503 else f"status {answer.status}: {said['message']}"
                lines = answer.read().decode().splitlines()
            except Exception as e:  # whatever it is, the table shows it
                return repr(e)
        found = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]
        if not found:
            return "an empty answer"
        if "error" in found[-1] or "content" not in found[-1]:
            return f"in the stream: {found[-1].get('error', found[-1])['message']}"
        written = "".join(each["content"] for each in found)
        is_right = found[-1]["stop"] and self._right[text].startswith(written) and written
        return "right" if is_right else "wrong"


def killed_at_random(model: Path, n_kills: int, seed: int) -> tuple[list[Kill], list[Asked], list[int], str]:
    """The kills, the requests, the processes that are left, and what the server wrote."""
    numbers, mark, kills = random.Random(seed), uuid.uuid4().hex, []
    os.environ[_MARK] = mark
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with serving(model, log, "--device", "CPU", "--ctx-size", 4096) as alone:
            right = {text: alone.complete(text, _MOST_TOKENS, ignore_eos=True) for text in _TEXTS}
        port = free_port()
        worker = working(port=port)
        address, process = worker.__enter__()
        options = ("--rpc", address, "--device", "RPC0", "--parallel", 4, "--ctx-size", 4096)
        with serving(model, log, *options) as server, Clients(server, right, seed) as clients:
            for n in range(n_kills + 1):
                back = time.monotonic()
                if n % 2 == 0 or n == n_kills:  # else perhaps while the model is loaded again
                    wait_until(lambda back=back: server.process.poll() or clients.succeeded_since(back))
                    assert server.process.poll() is None, log.read_text(errors="replace")[-4000:]
                if n == n_kills:
                    break
                time.sleep(numbers.uniform(0, 3))
                at = time.monotonic()
                process.kill()
                worker.__exit__(None, None, None)
                time.sleep(numbers.uniform(0, 2))
                worker = working(port=port)
                _, process = worker.__enter__()
                kills.append(Kill(at, time.monotonic()))
        worker.__exit__(None, None, None)
        said = log.read_text(errors="replace")
    del os.environ[_MARK]
    return kills, clients.asked, _left(mark), said


def _left(mark: str) -> list[int]:
    """The processes that were started with this mark and still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass  # it has ended
    return found


def summary(kills: list[Kill], asked: list[Asked], left: list[int]) -> dict[str, object]:
    """Figures of the kills, by name."""

    def was_running(request: Asked) -> bool:
        # a request may begin between a kill and the moment at which the server notices it
        return any(request.start < kill.back and kill.at < request.end for kill in kills)

    failed = [each for each in asked if each.result not in ("right", "away")]
    right = sorted(each.start for each in asked if each.result == "right")
    later = [min(each for each in right if each > kill.at) - kill.back for kill in kills]
    waits = [max(0.0, each) for each in later]
    return {
        "kills": len(kills),
        "requests answered": len(right),
        "refused with 503 while the worker was away": sum(each.result == "away" for each in asked),
        "failed, running at a kill": sum(was_running(each) for each in failed),
        "failed otherwise": [each.result for each in failed if not was_running(each)],
        "wrong texts": sum(each.result == "wrong" for each in asked),
        "seconds from the worker's return to a request that succeeds: median": statistics.median(waits),
        "seconds likewise: most": max(waits),
        "processes left": left,
        "what those that failed said": sorted({each.result for each in failed}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    model = args.model or models.tiny_tiers("f16", "q4_0")
    *seen, said = killed_at_random(model, args.kills, args.seed)
    found = summary(*seen)
    for name, value in found.items():
        print(f"{name}: {value:.2f}" if isinstance(value, float) else f"{name}: {value}")
    is_wrong = bool(found["failed otherwise"] or found["wrong texts"] or found["processes left"])
    if is_wrong:
        print(said[-20000:], file=sys.stderr)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
