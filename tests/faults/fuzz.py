# SPDX-License-Identifier: MIT
"""Damaged files for the readers in Python, and for llama.cpp's loader with our cache.

    python tests/faults/fuzz.py [--readers N] [--loads N] [--crafted N] [--seed SEED]

--readers: N mutants of each format that Python reads: anything but our own errors is a defect.
--loads: N mutants of the headers of each of three models, loaded and computed with, each in a process of its
own (some 50 ms): an abort is what is looked for. An accepted file must compute the same as stock's path of
the same libraries.
--crafted: the same with N headers of each model in which one number is replaced by an odd one.
tests/cpp/fuzz/fuzz-files.cpp has the readers in C++.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import convert_fixtures  # noqa: E402
import models  # noqa: E402
import numpy as np  # noqa: E402
import traces  # noqa: E402
from gguf import GGUFReader  # noqa: E402

from pyhobbit.chat.saved import SavedChat, read_chat  # noqa: E402
from pyhobbit.convert.imatrix import read_imatrix  # noqa: E402
from pyhobbit.errors import HobbitError  # noqa: E402
from pyhobbit.model.file_names import options_path  # noqa: E402
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
_ODD = (*_NUMBERS, 0x7FC00000, 0xFF800000)  # and floats: not a number, minus infinity
_TOKENS = (1, 5, 9, 2)
_TIMEOUT_S = 30  # seconds of CPU time; a machine may be busy


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


def crafted(good: Path, data: bytes, numbers: random.Random) -> Iterator[bytes]:
    """Headers in which one number of a key or a tensor's entry is another, without end."""
    reader, places = GGUFReader(good), list[tuple[int, int]]()
    for field in (*reader.fields.values(), *(tensor.field for tensor in reader.tensors)):
        at = field.offset
        for part in field.parts[:8]:  # the first elements of an array are enough
            if part.dtype != np.uint8 or part.size == 1:  # others are texts
                places += [(at + i, part.itemsize) for i in range(0, part.nbytes, part.itemsize)]
            at += part.nbytes
    while True:
        at, width = numbers.choice(places)
        value = struct.pack("<Q", numbers.choice(_ODD))[:width]
        if value != data[at : at + width]:
            yield data[:at] + value + data[at + width :]


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
    trace = traces.write_trace(folder / "t.csv", traces.letters("abcABCabAB"), 1, 4, 1)
    chat = folder / "chat.json"
    turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    SavedChat("m", "be short", turns, SamplingConfig(), 5).write(chat)
    options = folder / "o.toml"
    options.write_text('memory = "8G"\nt1 = 0.6\nt2 = 0.9\npolicy = "lru"\n')
    beside = folder / "beside"
    beside.mkdir()

    def of_options(path: Path) -> Any:
        model = beside / "m.gguf"
        path.rename(options_path(model))
        return read_options(model)

    return {
        "GGUF": (small, read_model_file),
        "tiers": (models.tiny_tiers("q8_0", "q4_0"), read_model_file),
        "imatrix": (imatrix, lambda path: read_imatrix(path, tensors)),
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
            read(Path(shutil.copy(good, folder / f"copy{good.suffix}")))  # or its mutants test nothing
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
    """A hash of the logits after some tokens; None if the model is refused."""
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
            resource.setrlimit(resource.RLIMIT_CPU, (_TIMEOUT_S, _TIMEOUT_S))
            ctypes.CDLL(None).alarm(20 * _TIMEOUT_S)
            os.write(write, (digest(model, cached) or "").encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return (found or None) if status == 0 else f"ended by {status}"


def outcome_of(path: Path, kind: str) -> str:
    found = in_child(path, cached=True)
    if found is None or found.startswith("ended"):
        return found or "refused"
    if kind != "plain":  # stock cannot read tiers
        return "computed"
    return "stock's text" if in_child(path, cached=False) == found else "another text"


def fuzz_loads(n: int, n_crafted: int, seed: int) -> int:
    """Prints the counts by model; returns the number of defects."""
    import pyhobbit.hobbit  # noqa: F401  (once, not in each child)

    seeds = {
        "plain": models.random_model("qwen3moe", "q8_0"),
        "tiers": models.tiny_tiers("q8_0", "q4_0"),
    }
    n_bad = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "mutant.gguf")
        for kind, good in seeds.items():
            data, header, numbers = good.read_bytes(), header_size(good), random.Random(seed)
            changed = {
                "mutated": islice(iter(lambda: mutated(data, header, numbers), None), n),  # noqa: B023 (used at once)
                "crafted": islice(crafted(good, data, numbers), n_crafted),
            }
            for how, files in changed.items():
                counts = Counter[str]()
                for i, file in enumerate(files):
                    path.write_bytes(file)
                    outcome = outcome_of(path, kind)
                    counts[outcome] += 1
                    if outcome not in ("refused", "computed", "stock's text"):
                        n_bad += 1
                        kept = Path(tempfile.gettempdir(), f"fuzz-{kind}-{how}-{seed}-{i}.gguf")
                        kept.write_bytes(file)
                        print(f"{kind}: {outcome}: {kept}", flush=True)
                print(f"{kind:14} {counts.total():8} {how}: {dict(counts)}", flush=True)
    return n_bad


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", type=int, default=0, metavar="N")
    parser.add_argument("--loads", type=int, default=0, metavar="N")
    parser.add_argument("--crafted", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    n_bad = fuzz_readers(args.readers, args.seed) if args.readers else 0
    if args.loads or args.crafted:
        n_bad += fuzz_loads(args.loads, args.crafted, args.seed)
    return 1 if n_bad else 0


if __name__ == "__main__":
    sys.exit(main())
