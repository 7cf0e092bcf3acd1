# SPDX-License-Identifier: MIT
"""Token/s with another machine by the speed of the link, measured and as `pyhobbit inspect` tells before.

    python tests/device/links.py --memory 600M      # as root: it makes two network namespaces

The worker has a namespace of its own, and tbf bounds the bytes per second of both ends of the link. The model
has random weights. Without the worker experts beyond --memory are read from the disk, which --disk bounds.
Runs with and without the worker take turns; a cell has their median, and the least and most.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.harness.files import SHAPES, write_model
from bench.harness.system import remove_cgroup
from pyhobbit.settings.config import parse_size

_ENDS = {"hobbit-here": "10.99.0.1", "hobbit-there": "10.99.0.2"}
_PORT, _LINK = "50052", "hobbit0"
_PROGRAM = (sys.executable, "-m", "pyhobbit")
_CGROUPS = Path("/sys/fs/cgroup")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextmanager
def namespaces() -> Iterator[None]:
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


def bound(gbit: float) -> None:
    """Lets both ends send so many Gbit/s."""
    for name in _ENDS:
        bucket = f"{max(64, int(1000 * gbit))}kb"
        how = ("tbf", "rate", f"{gbit}gbit", "burst", bucket, "latency", "20ms")
        _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", _LINK, "root", *how)


@contextmanager
def _slow_disk(path: Path, bytes_per_s: int) -> Iterator[None]:
    """This process and those that it starts read so much of the disk of `path`."""
    number, is_v2 = path.stat().st_dev, (_CGROUPS / "cgroup.controllers").exists()
    disk = f"{os.major(number)}:{os.minor(number)}"
    parent = _CGROUPS if is_v2 else _CGROUPS / "blkio"
    folder = parent / f"hobbit-links-{os.getpid()}"
    folder.mkdir()
    try:
        if is_v2:
            (parent / "cgroup.subtree_control").write_text("+io")
            (folder / "io.max").write_text(f"{disk} rbps={bytes_per_s}")
        else:
            (folder / "blkio.throttle.read_bps_device").write_text(f"{disk} {bytes_per_s}")
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        remove_cgroup(folder)


def _here(*arguments: str) -> Any:
    return json.loads(_run("ip", "netns", "exec", "hobbit-here", *_PROGRAM, *arguments, "--json"))


def _decoded(model: Path, *options: str) -> float:
    done = _here("bench", str(model), "--prompts", "64", "--set", "warm_up=256", "-n", "96", *options)
    return float(done["decoding"]["tokens_per_second"])


def _told(model: Path, *options: str) -> tuple[float, str]:
    """Token/s, and which placement was measured to be faster."""
    found = _here("inspect", str(model), *options)
    return found["speed"]["tokens_per_second"], found["placement"].partition(",")[0]


def _cell(rates: list[float]) -> str:
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"


def _compare(model: Path, limit: tuple[str, ...], link: list[float], reps: int, told: bool) -> None:
    """Prints a row for each speed of the link."""
    there = ("--rpc", f"{_ENDS['hobbit-there']}:{_PORT}")
    used = (*there, "--device", "RPC0", "--placement", "cache")
    for gbit in link:
        bound(gbit)
        # a placement that was kept for another link does not count
        with tempfile.TemporaryDirectory() as os.environ["HF_HOME"]:
            alone, together = [], []
            for _ in range(reps):
                alone.append(_decoded(model, *limit))
                together.append(_decoded(model, *limit, *used))
            row = [f"{gbit:g}", _cell(alone), "", _cell(together), "", ""]
            if told:
                row[2] = f"{_told(model, *limit)[0]:.1f}"
                rate, row[5] = _told(model, *limit, *there)
                row[4] = f"{rate:.1f}"
        print("|", " | ".join(row), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--memory", required=True, metavar="SIZE", help="limit of this machine's process")
    parser.add_argument("--disk", type=parse_size, metavar="SIZE", help="bytes per second of the disk")
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 1, 2.5, 10])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--no-inspect", action="store_true", help="measure alone")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    model = write_model(args.folder, "olmoe", SHAPES["olmoe"].scaled(args.layers), "q4_0")
    disk = "" if args.disk is None else f", disk {args.disk / 1e6:.0f} MB/s"
    print(f"{model.name}, {model.stat().st_size / 2**20:.0f} MiB, --memory {args.memory}{disk}; token/s")
    print("| Gbit/s | alone | told | with the worker | told | auto takes |\n|---|---|---|---|---|---|")
    worker = (*_PROGRAM, "worker", "--host", _ENDS["hobbit-there"], "--port", _PORT)
    with ExitStack() as stack:
        stack.enter_context(namespaces())
        enter = ("ip", "netns", "exec", "hobbit-there")
        process = stack.enter_context(subprocess.Popen((*enter, *worker), stdout=subprocess.DEVNULL))
        stack.callback(process.terminate)
        time.sleep(3)
        if args.disk is not None:
            stack.enter_context(_slow_disk(model, args.disk))
        limit = ("--memory", args.memory, "--ctx", "512")
        _compare(model, limit, args.gbit, args.reps, told=not args.no_inspect)


if __name__ == "__main__":
    main()
