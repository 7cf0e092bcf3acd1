# SPDX-License-Identifier: MIT
"""Damaged files for the readers in Python, and for llama.cpp's loader with our cache.

    python tests/faults/fuzz.py [--readers N] [--loads N] [--seed SEED]

--readers: N mutants of each format that Python reads: anything but our own errors is a defect.
--loads: N mutants of the headers of three models, each loaded and computed with, in a process of its own: an
abort is what is looked for. What is accepted must compute what stock's path of the same libraries computes.
tests/cpp/fuzz/fuzz-files.cpp has the readers in C++.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import random
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "convert")]

import convert_fixtures  # noqa: E402
import models  # noqa: E402
import numpy as np  # noqa: E402
import traces  # noqa: E402

from pyhobbit.chat.saved import SavedChat, read_chat  # noqa: E402
from pyhobbit.convert.imatrix import read_imatrix  # noqa: E402
from pyhobbit.errors import HobbitError  # noqa: E402
from pyhobbit.model.gguf_file import read_gguf  # noqa: E402
from pyhobbit.model.model_file import read_model_file  # noqa: E402
from pyhobbit.model.options_file import read_options  # noqa: E402
from pyhobbit.routing.trace import read_trace  # noqa: E402
from pyhobbit.settings.config import SamplingConfig  # noqa: E402

_NUMBERS = (
    0,
    1,
    2,
    4,
    8,
    9,
    63,
    64,
    255,
    65535,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 62,
    1 << 63,
    (1 << 64) - 1,
)
_TOKENS = (1, 5, 9, 2)
_TIMEOUT_S = 30


def header_size(good: Path) -> int:
    """Bytes that its reader looks at."""
    if good.read_bytes()[:4] != b"GGUF":
        return good.stat().st_size
    return min(tensor.offset for tensor in read_gguf(good).tensors)


def mutated(good: bytes, header: int, numbers: random.Random) -> bytes:
    """One to three changes: cuts, copies, flipped bits, numbers that no reader expects."""
    data = bytearray(good)
    for _ in range(numbers.randint(1, 3)):
        at = numbers.randrange(min(len(data), header) or 1)
        kind = numbers.randrange(8)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            del data[at : at + numbers.randint(1, 8)]
        elif kind == 2:
            data[at:at] = data[at : at + numbers.randint(1, 64)]
        elif kind in (3, 4) and data:
            data[min(at, len(data) - 1)] ^= 1 << numbers.randrange(8)
        else:
            width = 1 << numbers.randrange(4)
            data[at : at + width] = struct.pack("<Q", numbers.choice(_NUMBERS))[:width]
    return bytes(data)


#
# readers
#


def readers(folder: Path) -> dict[str, tuple[Path, Callable[[Path], Any]]]:
    """A good file of each format, and what reads it."""
    small = convert_fixtures.write_moe(folder / "small.gguf", "q8_0")
    tensors = read_gguf(small).tensors
    name = "blk.0.ffn_down_exps.weight"
    sums = np.ones((convert_fixtures.N_EXPERT, next(t.ne[0] for t in tensors if t.name == name)), np.float32)
    imatrix = convert_fixtures.write_imatrix(
        folder / "i.gguf", {name: sums}, [1.0] * convert_fixtures.N_EXPERT
    )
    legacy = folder / "i.dat"
    legacy.write_bytes(
        struct.pack("<ii", 1, len(name)) + name.encode() + struct.pack("<ii", 1, sums.size) + sums.tobytes()
    )
    trace = traces.write_trace(folder / "t.csv", traces.letters("abcABCabAB"), 1, 4, 1)
    chat = folder / "chat.json"
    SavedChat("m", "be short", ({"role": "user", "content": "a"},), SamplingConfig(), 5).write(chat)
    options = folder / "o.toml"
    options.write_text('memory = "8G"\nt1 = 0.6\nt2 = 0.9\npolicy = "lru"\n')
    beside = folder / "beside"
    beside.mkdir()

    def of_options(path: Path) -> Any:
        path.rename(beside / "m.pyhobbit.toml")
        return read_options(beside / "m.gguf")

    return {
        "GGUF": (small, read_model_file),
        "tiers": (models.tiny_tiers("q8_0", "q4_0"), read_model_file),
        "residual": (models.tiny_residual("q4_0", "q4_0"), read_model_file),
        "imatrix": (imatrix, lambda path: read_imatrix(path, tensors)),
        "imatrix.dat": (legacy, lambda path: read_imatrix(path, tensors)),
        "trace": (trace, read_trace),
        "conversation": (chat, read_chat),
        "options": (options, of_options),
    }


def fuzz_readers(n: int, seed: int) -> int:
    """Prints the counts by format; returns the number of defects."""
    n_bad = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        for kind, (good, read) in readers(folder).items():
            numbers, counts = random.Random(seed), Counter[str]()
            data, header = good.read_bytes(), header_size(good)
            for _ in range(n):
                path = folder / f"mutant{good.suffix}"
                path.write_bytes(mutated(data, header, numbers))
                try:
                    read(path)
                    counts["read"] += 1
                except HobbitError:
                    counts["refused"] += 1
                except Exception as e:
                    counts["bad"] += 1
                    print(f"{kind}: {type(e).__name__}: {e}")
            n_bad += counts["bad"]
            print(f"{kind:14} {n:8} mutants: {dict(counts)}", flush=True)
    return n_bad


#
# loads
#


def digest(model: Path, cached: bool) -> str | None:
    """Of the logits after some tokens; None where the model is refused."""
    import llama_cpp

    from pyhobbit import Hobbit

    try:
        options = {"pools": 3_000_000} if cached else {}
        with Hobbit(model, n_ctx=64, verbose=False, **options) as opened:
            opened.eval(_TOKENS)
            logits = llama_cpp.llama_get_logits_ith(opened.ctx, -1)
            return hashlib.sha256(ctypes.string_at(logits, 4 * opened.n_vocab())).hexdigest()
    except (HobbitError, ValueError, RuntimeError, OSError):
        return None


def in_child(model: Path, cached: bool) -> str | None:
    """digest(), or what ended the process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.close(read)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            ctypes.CDLL(None).alarm(_TIMEOUT_S)
            os.write(write, (digest(model, cached) or "").encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return (found or None) if status == 0 else f"ended by {status}"


def fuzz_loads(n: int, seed: int) -> int:
    """Prints the counts by model; returns the number of defects."""
    import pyhobbit.hobbit  # noqa: F401  (once, not in each child)

    seeds = {
        "plain": models.random_model("qwen3moe", "q8_0"),
        "tiers": models.tiny_tiers("q8_0", "q4_0"),
        "residual": models.tiny_residual("q4_0", "q4_0"),
    }
    n_bad = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for kind, good in seeds.items():
            data, header = good.read_bytes(), header_size(good)
            numbers, counts = random.Random(seed), Counter[str]()
            for i in range(n):
                path = Path(folder, "mutant.gguf")
                path.write_bytes(mutated(data, header, numbers))
                found = in_child(path, cached=True)
                outcome = (
                    "refused" if found is None else "crashed" if found.startswith("ended") else "computed"
                )
                if outcome == "computed" and kind == "plain":
                    stock = in_child(path, cached=False)
                    outcome = "stock's text" if stock == found else "another text"
                counts[outcome] += 1
                if outcome in ("crashed", "another text"):
                    n_bad += 1
                    kept = Path(tempfile.gettempdir(), f"fuzz-{kind}-{seed}-{i}.gguf")
                    kept.write_bytes(path.read_bytes())
                    print(f"{kind}: {outcome}, {found}: {kept}", flush=True)
            print(f"{kind:14} {n:8} loads: {dict(counts)}", flush=True)
    return n_bad


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", type=int, default=0, metavar="N")
    parser.add_argument("--loads", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    n_bad = fuzz_readers(args.readers, args.seed) if args.readers else 0
    n_bad += fuzz_loads(args.loads, args.seed) if args.loads else 0
    return 1 if n_bad else 0


if __name__ == "__main__":
    sys.exit(main())
