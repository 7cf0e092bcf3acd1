# SPDX-License-Identifier: MIT
"""Runs the matrix's cases with the shim preloaded: a case a line of JSON on standard input, each in a fork.

A fork saves the time of imports. A case's output goes to the files `out` and `err` of its folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from pyhobbit import Hobbit
from pyhobbit.cli.main import main
from pyhobbit.errors import HobbitError

PROMPT = "def read_file(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef write_file("
N_DECODED = 12
READ_TIMEOUT_S = {True: 8, False: 50}  # where a read hangs, and elsewhere: a busy machine is slow
shim = ctypes.CDLL(None)


def arm(case: dict[str, Any], place: str) -> None:
    if case["place"] == place:
        shim.fault_set(case["fault"].encode())


def compute(case: dict[str, Any]) -> None:
    """Prints the checksum of the logits after a prompt and of some tokens of its greedy continuation."""
    arm(case, "load")
    digest = hashlib.sha256()
    options = {"hobbit.read_timeout": READ_TIMEOUT_S[":hang:" in case["fault"]]}
    with Hobbit(
        case["model"], pools=3_000_000, t1=1.0, n_ctx=256, verbose=False, kv_overrides=options
    ) as model:
        tokens = model.tokenize(PROMPT.encode())
        arm(case, "prompt")
        for i in range(N_DECODED):
            if i == 1:
                arm(case, "decode")
            model.eval(tokens)
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), (model.n_vocab(),))
            digest.update(logits.tobytes())
            tokens = [int(logits.argmax())]
        print(digest.hexdigest())


def child(case: dict[str, Any]) -> int:
    for name, fd in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(case["folder"], name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), fd)
    try:
        if case["place"] in ("convert", "calibrate"):
            arm(case, case["place"])
            return main([case["place"], *case["arguments"]])
        compute(case)
        return 0
    except HobbitError as e:
        print(f"pyhobbit: {e}", file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
        counts = {"calls": shim.fault_count(), "hits": shim.fault_hits()}
        shim.fault_set(b"none:none:0:0::")
        Path(case["folder"], "counts").write_text(json.dumps(counts))


def run(case: dict[str, Any]) -> int | None:
    """The exit status, negative for a signal; None where the time is over."""
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            status = child(case)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + case["timeout"]
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
