# SPDX-License-Identifier: MIT
"""A subset of the fault matrix (matrix.py), and what a hung disk does to a server."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import matrix
import models
import pytest
from conftest import RunPyhobbit
from servers import END_TIMEOUT_S, PROMPT, serving

HUNG_S = 10  # the server's health is told after 3


def test_faults_end_in_the_right_text_or_a_clear_error(tmp_path: Path) -> None:
    results = matrix.run_all(list(matrix.cases(small=True)), tmp_path, jobs=2)
    bad = [f"{case.name}: {outcome}\n{said}" for case, outcome, said in results if outcome not in matrix.GOOD]
    assert not bad, "\n\n".join(bad)
    counts = Counter(outcome for _, outcome, _ in results)
    assert counts["right"] > 3
    assert counts["clear"] > 10


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [("read", "EIO", "Input/output error"), ("open", "EMFILE", "Too many open files")],
)
@pytest.mark.parametrize("file", ["m.gguf", "m.calibration.gguf"])
def test_a_header_that_cannot_be_read_is_not_called_damaged(
    tmp_path: Path,
    run_pyhobbit: RunPyhobbit,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    kind: str,
    says: str,
    file: str,
) -> None:
    for name in ("m.gguf", "m.calibration.gguf"):
        shutil.copyfile(models.tiny(), tmp_path / name)  # no case sees the calibration's content
    monkeypatch.setenv("LD_PRELOAD", str(matrix.build_shim(tmp_path)))
    monkeypatch.setenv("FAULT", f"{call}:{kind}:0:1000000:{tmp_path / file}:")
    done = run_pyhobbit("chat", tmp_path / "m.gguf", "-p", "x", "-n", 1, "--pools", "3M")
    assert done.returncode == 1
    assert says in done.stderr
    for word in ("damaged", "calibrate", "Traceback"):
        assert word not in done.stderr.replace(str(tmp_path), "")


def test_a_server_whose_disk_hangs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, armed = models.tiny_tiers("q8_0", "q4_0"), tmp_path / "armed"
    monkeypatch.setenv("LD_PRELOAD", str(matrix.build_shim(tmp_path)))
    monkeypatch.setenv("FAULT", f"read:hang:0:1:{model.stem}:{armed}")
    timeout = ("--override-kv", f"hobbit.read_timeout=int:{HUNG_S}")
    with serving(model, tmp_path / "log", "--pools", "3M", "--parallel", 1, *timeout) as server:
        monkeypatch.delenv("LD_PRELOAD")
        armed.touch()
        answers = []
        body = {"prompt": PROMPT, "n_predict": 40}
        asking = threading.Thread(target=lambda: answers.append(server.request("/completion", body)))
        asking.start()
        health = server.request("/health")
        while asking.is_alive() and health.status == 200:
            time.sleep(0.2)
            health = server.request("/health")
        assert health.status == 503
        assert health.error.startswith("the disk has not answered a read for ")
        assert server.request("/hobbit").json["reads"] > 0
        assert "hobbit_reads_total" in server.request("/metrics").text
        assert asking.is_alive()
        asking.join(300)
        assert answers[0].status == 500
        assert f"the disk has not answered a read for {HUNG_S} s" in answers[0].error
        assert server.request("/health").status == 503
        server.process.terminate()
        assert server.process.wait(END_TIMEOUT_S) == 0  # after one more timeout: the read is still out
