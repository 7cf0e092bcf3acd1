# SPDX-License-Identifier: MIT
"""Token/s with another machine by the speed of the link, measured and as `pyhobbit inspect` tells before.

    python tests/device/links.py --memory 600M      # as root: it makes two network namespaces

The worker has a namespace of its own, and tbf bounds the bytes per second of both ends of the link. The model
has random weights. Without the worker the experts beyond --memory are read from the disk.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness.files import SHAPES, write_model

_ENDS = {"hobbit-here": "10.99.0.1", "hobbit-there": "10.99.0.2"}
_PORT, _LINK = "50052", "hobbit0"
_PROGRAM = (sys.executable, "-m", "pyhobbit")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def _namespaces() -> Iterator[None]:
    """Two namespaces with a link between them."""
    here, there = _ENDS
    try:
        for name in _ENDS:
            _run("ip", "netns", "add", name)
        end = ("name", _LINK, "netns")
        _run("ip", "link", "add", *end, here, "type", "veth", "peer", *end, there)
        for name, address in _ENDS.items():
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", _LINK)
            _run("ip", "-n", name, "link", "set", _LINK, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in _ENDS:
            subprocess.run(("ip", "netns", "del", name), check=False)


def _bound(gbit: float) -> None:
    """Lets both ends send so many Gbit/s."""
    for name in _ENDS:
        bucket = f"{max(64, int(1000 * gbit))}kb"
        how = ("tbf", "rate", f"{gbit}gbit", "burst", bucket, "latency", "20ms")
        _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", _LINK, "root", *how)


def _here(*arguments: str) -> Any:
    command = ("ip", "netns", "exec", "hobbit-here", *_PROGRAM, *arguments, "--json")
    return json.loads(_run(*command))


def _decoded(model: Path, *options: str) -> float:
    done = _here("bench", str(model), "--prompts", "64", "-n", "96", "--reps", "3", *options)
    return float(done["decoding"]["tokens_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--memory", required=True, metavar="SIZE", help="limit of this machine's process")
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 1, 5, 10])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    model = write_model(args.folder, "olmoe", SHAPES["olmoe"].scaled(args.layers), "q4_0")
    limit = ("--memory", args.memory, "--ctx", "512")
    remote = ("--rpc", f"{_ENDS['hobbit-there']}:{_PORT}", "--device", "RPC0", "--placement", "cache")
    print(f"{model.name}, {model.stat().st_size / 2**20:.0f} MiB, --memory {args.memory}; token/s")
    print("| link, Gbit/s | alone | with the worker | foretold by inspect |\n|---|---|---|---|")
    with _namespaces():
        address = _ENDS["hobbit-there"]
        enter = ("ip", "netns", "exec", "hobbit-there")
        worker = (*enter, *_PROGRAM, "worker", "--host", address, "--port", _PORT)
        with subprocess.Popen(worker, stdout=subprocess.DEVNULL) as process:
            try:
                time.sleep(3)
                for gbit in args.gbit:
                    _bound(gbit)
                    alone, together = _decoded(model, *limit), _decoded(model, *limit, *remote)
                    told = _here("inspect", str(model), *limit, *remote)["speed"]["tokens_per_second"]
                    print(f"| {gbit:g} | {alone:.1f} | {together:.1f} | {told:.1f} |", flush=True)
            finally:
                process.terminate()


if __name__ == "__main__":
    main()
