# SPDX-License-Identifier: MIT
"""A slow disk is seen as waiting, and a disk that is not asked is not."""

import json
from pathlib import Path

import hobbits
import matrix

N_SLOW, SLOW_S = 8, 0.2  # reads that take longer, as in shim.c

_WAIT = """
import ctypes, json, sys
from pyhobbit import Hobbit

shim = ctypes.CDLL(None)
with Hobbit(
    sys.argv[1], pools=64 << 20, prefetch=0, t1=1.0, io_threads=1, n_ctx=256, verbose=False
) as model:
    tokens = model.tokenize(b"def read_file(path):")
    shim.fault_set(sys.argv[2].encode())
    seen = []
    for _ in range(2):
        before = model.stats().cache
        for token in tokens:
            model.eval([token])
        done = model.stats().cache.since(before)
        seen.append({"misses": done.misses_high, "stall_s": done.stall_s, "compute_s": done.compute_s})
        model.reset()
        model.eval(tokens[:1])
        model.reset()
    print(json.dumps({"hits": shim.fault_hits(), "seen": seen}))
"""


def test_slow_reads_are_waited_for_and_what_is_resident_is_not(tiny_gguf: Path, tmp_path: Path) -> None:
    slow = f"read:slow:0:{N_SLOW}:{tiny_gguf.name}:"
    shim = matrix.build_shim(tmp_path)
    found = json.loads(hobbits.run_script(_WAIT, tiny_gguf, slow, LD_PRELOAD=str(shim)))
    assert found["hits"] == N_SLOW
    cold, warm = found["seen"]
    assert cold["misses"] > N_SLOW / 3  # each miss has three parts
    assert SLOW_S < cold["stall_s"] < cold["compute_s"]  # other reads may pass while experts compute
    assert (warm["misses"], warm["stall_s"]) == (0, 0)
    assert warm["compute_s"] > 0
