# SPDX-License-Identifier: MIT
"""The user's two commands: a checkpoint becomes a file, which runs in mixed precision."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import logits
import models
import numpy as np
import pytest
from exactness import SHORT_PLANS

from pyhobbit import CacheConfig, Engine, EngineConfig, Hobbit, SamplingConfig
from pyhobbit.cli.main import main
from pyhobbit.engine.stats import CacheStats

pytestmark = pytest.mark.model

SCRIPT = models.ROOT / "convert" / "make_gguf.py"
POOLS = 5 << 20  # the experts have 18 MiB
LINE = (
    "mixed precision by t1 0.6, t2 1; expected loss: KL divergence about 0.0002 to 0.011 nats, "
    "as of small models; --quality lossless turns it off"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the first command makes."""
    path = tmp_path_factory.mktemp("made") / "model.gguf"
    command = [sys.executable, SCRIPT, "--low", "q4_0", "--high", "f16", models.TINY / "model", "-o", path]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    return path


def _run(model: Path, **settings: object) -> CacheStats:
    """Counters of an answer, without the prompt."""
    config = EngineConfig(CacheConfig(prefetch=0, **{"pools": POOLS, **settings}), n_ctx=256)
    with Engine(model, config) as engine:
        pieces = engine.generate("def read_file(path):\n", 96, SamplingConfig(temp=0))
        next(pieces)
        before = engine.stats().cache
        for _ in pieces:
            pass
        return engine.stats().cache.since(before)


def test_it_reads_less_than_all_high_and_lossless_is_all_high(made: Path) -> None:
    mixed, high = _run(made), _run(made, t1=1.0)
    assert mixed.selections_low > 0 == mixed.selections_skipped
    assert mixed.bytes_read <= 0.8 * high.bytes_read
    lossless = _run(made, quality="lossless")
    assert (lossless.selections_high, lossless.bytes_read) == (high.selections_high, high.bytes_read)
    exact, stock = (
        logits.run(folder, model, SHORT_PLANS, settings)
        for folder, model, settings in (
            (models.lib_dir(), made, {"hobbit.quality": "lossless", "hobbit.pools": POOLS}),
            (models.stock_dir(), models.tiny(), None),
        )
    )
    for name, expected in stock.logits.items():
        np.testing.assert_array_equal(exact.logits[name], expected, err_msg=name)


def test_where_every_expert_fits_none_is_low(made: Path) -> None:
    assert _run(made, pools=64 << 20).selections_low == 0
    assert _run(made, pools=64 << 20, t1=0.6).selections_low > 0  # asked for


def test_a_line_says_so(made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chat = ["-p", "def f(", "-n", "2", "--pools", "5M"]
    assert main(["chat", str(made), *chat]) == 0
    assert f"pyhobbit: {LINE}\n" in capfd.readouterr().err
    for model, others in (
        (made, ["--quality", "lossless"]),
        (made, ["--set", "t1=0.6"]),
        (models.tiny(), []),
    ):
        assert main(["chat", str(model), *chat, *others]) == 0
        assert "mixed precision" not in capfd.readouterr().err
    base = Path(shutil.copyfile(models.tiny(), tmp_path / "base.gguf"))
    models.convert("--low", "q4_0", "--set", "t1=0.6", "--sidecar", base)
    assert main(["chat", str(base), *chat]) == 0
    assert f"pyhobbit: {LINE}\n" in capfd.readouterr().err
    with pytest.warns(UserWarning, match="mixed precision by t1 0.6, t2 1; .*; quality=lossless turns"):
        Hobbit(str(made), pools=POOLS, n_ctx=64).close()


def test_a_checkout_that_is_not_built_says_what_to_run(tmp_path: Path) -> None:
    script = tmp_path / "checkout" / "convert" / "make_gguf.py"
    script.parent.mkdir(parents=True)
    shutil.copyfile(SCRIPT, script)
    command = [sys.executable, "-S", script, "--low", "q4_0", "checkpoint"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=dict(os.environ, PYTHONPATH="")
    )
    folder = script.parents[1]
    assert done.returncode == 1
    assert done.stderr == (
        f"No module named 'pyhobbit': run 'make build' in {folder}, then '. {folder}/.venv/bin/activate', "
        "and this again\n"
    )
