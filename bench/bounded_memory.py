# SPDX-License-Identifier: MIT
"""Decode speed of a model bigger than its memory: stock llama.cpp's mmap against the expert cache.

Each repetition runs every arm once, in turn, in a memory cgroup of the given size with an empty page cache.
The model has random weights, so its routing is close to uniform: the hardest case for any cache.

    python tests/random_moe.py --arch qwen3moe --experts-type q4_0 --layers 12 --embd 2048 --ff 768 \\
        --experts 128 --used 8 --lib-dir build/stock/bin -o build/bench/qwen3moe.gguf
    python bench/bounded_memory.py build/bench/qwen3moe.gguf --share 0.25 --share 0.5

Needs root: for the cgroup, the page cache and the readahead of the disk, which is put back at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import limits  # noqa: E402

LINUX_READAHEAD_KB = 128


@dataclass(frozen=True)
class Arm:
    name: str
    lib_dir: Path
    cached: bool
    readahead_kb: int | None = None  # None: the disk's own


def disk_of(path: Path) -> Path:
    """The queue settings of the disk that holds the file."""
    device = path.stat().st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    queue = node / "queue" if (node / "queue").exists() else node.parent / "queue"
    return queue / "read_ahead_kb"


@contextmanager
def readahead(setting: Path, kilobytes: int | None) -> Iterator[None]:
    before = setting.read_text()
    try:
        if kilobytes is not None:
            setting.write_text(str(kilobytes))
        yield
    finally:
        setting.write_text(before)


def run_arm(arm: Arm, model: Path, memory: int, setting: Path) -> dict[str, float]:
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    command: list[object] = [
        sys.executable,
        ROOT / "bench/decode.py",
        "--lib-dir",
        arm.lib_dir,
        "--model",
        model,
    ]
    if arm.cached:
        command += ["--memory", memory]
    with readahead(setting, arm.readahead_kb), limits.memory_cgroup(memory) as cgroup:
        done = limits.run(command, cgroup, timeout_s=1800)
    if done.returncode:
        raise SystemExit(f"{arm.name} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--share", type=float, action="append", help="memory limit as share of the file")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench/bounded_memory.jsonl")
    args = parser.parse_args()

    from pyhobbit._paths import LIB_DIR

    setting = disk_of(args.model)
    own = int(setting.read_text())
    stock = ROOT / "build/stock/bin"
    arms = [
        Arm(f"stock mmap, readahead {own} KiB (this disk's)", stock, cached=False),
        Arm(
            f"stock mmap, readahead {LINUX_READAHEAD_KB} KiB",
            stock,
            cached=False,
            readahead_kb=LINUX_READAHEAD_KB,
        ),
        Arm("expert cache, high precision", LIB_DIR, cached=True),
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    size = args.model.stat().st_size
    print(f"{args.model.name}, {size / 1e9:.1f} GB, {os.cpu_count()} cores, {platform.machine()}")
    with args.out.open("a") as out:
        for share in args.share or [0.25]:
            speeds: dict[str, list[float]] = {arm.name: [] for arm in arms}
            for repetition in range(args.repetitions):
                for arm in arms:
                    result = run_arm(arm, args.model, int(size * share), setting)
                    speeds[arm.name].append(result["tokens_per_second"])
                    record = {
                        "arm": arm.name,
                        "share": share,
                        "repetition": repetition,
                        "model": args.model.name,
                    }
                    out.write(json.dumps({**record, **result}) + "\n")
                    out.flush()
            for name, values in speeds.items():
                speed = f"{statistics.median(values):6.2f} token/s ({min(values):.2f} to {max(values):.2f})"
                print(f"memory {share:.0%}  {name:45s} {speed}")


if __name__ == "__main__":
    main()
