# SPDX-License-Identifier: MIT
"""Perplexity and divergence: the figures, and the evaluator on the tiny model."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import models
import numpy as np
import pytest
from models import write_dense_llama

from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.quality import evaluate
from pyhobbit.quality.calibration import calibrate
from pyhobbit.quality.evaluate import Chunk, Evaluator
from pyhobbit.routing.observe import LayerEvent
from pyhobbit.settings.config import CacheConfig, CalibrationConfig, EngineConfig

TEXT = models.TINY / "heldout.txt"
ENGINE = EngineConfig(cache=CacheConfig(pools=5_000_000), n_ctx=128, n_threads=1)
N_CHUNKS = 3
N_LAYERS, N_EXPERTS, N_USED = 6, 8, 2


#
# figures
#


def test_the_figures_of_a_token_are_those_worked_by_hand() -> None:
    even = np.log(np.array([[0.5, 0.5], [0.25, 0.75]], np.float32))
    skew = np.log(np.array([[0.25, 0.75], [0.25, 0.75]], np.float32)) + 7  # a constant changes nothing
    found = evaluate.compare(even, skew, np.array([0, 1]))
    assert found.surprise == pytest.approx([math.log(4), math.log(4 / 3)], abs=1e-6)
    assert found.reference_surprise == pytest.approx([math.log(2), math.log(4 / 3)], abs=1e-6)
    expected = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.0]
    assert found.divergence == pytest.approx(expected, abs=1e-6)
    assert found.total_variation == pytest.approx([0.25, 0.0], abs=1e-6)
    assert found.same_top1.tolist() == [False, True]


def test_large_logits_neither_overflow_nor_lose_the_small_probabilities() -> None:
    logits = np.array([[1e4, 1e4 - 800.0, -1e4]], np.float32)
    assert evaluate.log_softmax(logits)[0] == pytest.approx([0.0, -800.0, -2e4])


def test_blocks_do_not_change_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 7, 5)).astype(np.float32)
    targets = rng.integers(0, 5, 7)
    whole, own = evaluate.compare(a, b, targets), evaluate.compare(a, a, targets)
    monkeypatch.setattr(evaluate, "_BLOCK_FLOATS", 12)  # two rows
    for found, wanted in zip(evaluate.compare(a, b, targets), whole, strict=True):
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(evaluate.compare(a, a, targets).surprise, own.surprise)
    np.testing.assert_array_equal(whole.reference_surprise, own.surprise)
    assert (whole.divergence > 0).all()


def test_perplexity_of_an_even_guess_is_the_size_of_the_vocabulary() -> None:
    chunk = list(range(8))
    logits = np.zeros((2, len(evaluate.scored_targets(chunk)), 8), np.float32)
    assert evaluate.scored_targets(chunk).tolist() == [5, 6, 7]
    assert evaluate.perplexity(logits, [chunk, chunk]) == pytest.approx(8)


def test_a_large_reference_lies_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_MEMORY_FLOATS", 23)
    array = evaluate._large_array((2, 3, 4))
    array[1] = 1.5
    assert isinstance(array, np.memmap)
    assert array.sum() == 18
    assert not isinstance(evaluate._large_array((2, 3, 3)), np.memmap)


def test_a_reference_without_room_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_file: int, _offset: int, _n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(HobbitError, match=r"4\.0 GiB .* cannot be had in .* \(No space left.*; set TMPDIR"):
        evaluate._large_array((1 << 10, 1 << 10, 1 << 10))


#
# the evaluator
#


@pytest.fixture(scope="module")
def opened() -> Iterator[Evaluator]:
    # a coarse low tier: its cost stands out on a short text
    with Evaluator(models.tiny_tiers("f16", "tq2_0"), ENGINE) as evaluator:
        yield evaluator


@pytest.fixture(scope="module")
def chunks(opened: Evaluator) -> list[Chunk]:
    return opened.chunks(TEXT.read_text())[:N_CHUNKS]


@pytest.fixture(scope="module")
def reference(opened: Evaluator, chunks: list[Chunk]) -> np.ndarray:
    return opened.reference(chunks)


def test_perplexity_is_llama_perplexitys(chunks: list[Chunk], reference: np.ndarray) -> None:
    command = [models.bin_dir() / "llama-perplexity", "-m", models.tiny_experts("f16"), "-f", TEXT]
    # on a busy machine it may end before its last lines are written: it goes on behind the chunks that count
    command += ["-c", "128", "-b", "128", "--chunks", str(4 * N_CHUNKS), "-t", "1"]
    for _ in range(20):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        if found := re.search(rf"\[{N_CHUNKS}\]([\d.]+)", done.stdout + done.stderr):
            break
    assert found
    assert evaluate.perplexity(reference, chunks) == pytest.approx(float(found[1]), abs=1e-3)


def test_high_precision_differs_in_nothing_from_itself(
    opened: Evaluator, chunks: list[Chunk], reference: np.ndarray
) -> None:
    quality = opened.measure(chunks, reference)
    assert (quality.mean_kl, quality.p99_kl, quality.same_top1, quality.perplexity_ratio) == (0, 0, 1, 1)
    assert quality.total_variation == 0
    assert quality.perplexity == evaluate.perplexity(reference, chunks)
    assert (quality.share_high, quality.share_low, quality.share_skipped) == (1, 0, 0)
    high_bytes = models.routed_expert_bytes(models.tiny_experts("f16")) / (N_LAYERS * N_EXPERTS)
    assert quality.bytes_per_token == N_LAYERS * N_USED * high_bytes


def test_shares_and_bytes_are_those_of_the_decisions(
    opened: Evaluator, chunks: list[Chunk], reference: np.ndarray
) -> None:
    seen: list[np.ndarray] = []
    with opened.observing(lambda event: seen.append(event.precisions.copy())):
        quality = opened.measure(chunks, reference, t1=0.7, t2=0.9)
    precisions = np.concatenate(seen)
    assert precisions.shape == (N_LAYERS * N_CHUNKS * 128, N_USED)
    high, low, skipped = (float(np.mean(precisions == value)) for value in (2, 1, 0))
    assert (quality.share_high, quality.share_low, quality.share_skipped) == pytest.approx(
        (high, low, skipped)
    )
    assert min(high, low, skipped) > 0
    high_bytes, low_bytes = opened.info.mean_expert_bytes
    assert low_bytes < high_bytes / 5
    assert quality.bytes_per_token == pytest.approx(N_LAYERS * N_USED * (high * high_bytes + low * low_bytes))


def test_the_figures_of_a_text_are_those_of_its_tokens(
    monkeypatch: pytest.MonkeyPatch, opened: Evaluator, chunks: list[Chunk], reference: np.ndarray
) -> None:
    computed = opened._scored_logits
    # An even guess in place of what was computed: the first token counts as the most probable one.
    monkeypatch.setattr(opened, "_scored_logits", lambda chunk: np.zeros_like(computed(chunk)))
    quality = opened.measure(chunks, reference)
    n_vocab = reference.shape[-1]
    chance = evaluate.log_softmax(reference)
    divergences = np.log(n_vocab) + (np.exp(chance) * chance).sum(axis=-1).ravel()
    assert quality.perplexity == pytest.approx(n_vocab)
    assert quality.perplexity_ratio == pytest.approx(n_vocab / evaluate.perplexity(reference, chunks))
    assert quality.mean_kl == pytest.approx(divergences.mean())
    n_above = int((divergences > quality.p99_kl).sum())
    assert n_above == math.ceil(0.01 * (divergences.size - 1))
    assert quality.same_top1 == np.mean(reference.argmax(axis=-1) == 0)


def test_every_token_gets_the_precision_of_its_own_weights(
    opened: Evaluator, chunks: list[Chunk], reference: np.ndarray
) -> None:
    """Strictly: neither what other tokens ask for nor what is resident changes it."""

    def check(event: LayerEvent) -> None:
        assert event.weights is not None
        before = event.weights.max(axis=1) / event.weights.sum(axis=1)
        second = np.where(before <= 0.6, 2, np.where(before <= 0.95, 1, 0))
        best = event.weights.argmax(axis=1)
        np.testing.assert_array_equal(np.take_along_axis(event.precisions, best[:, None], 1), 2)
        np.testing.assert_array_equal(event.precisions[np.arange(len(best)), 1 - best], second)

    with opened.observing(check):
        opened.measure(chunks[:1], reference[:1], t1=0.6, t2=0.95)


def test_one_by_one_and_at_once_measure_the_same(chunks: list[Chunk], reference: np.ndarray) -> None:
    with Evaluator(models.tiny_tiers("f16", "tq2_0"), replace(ENGINE, n_batch=1)) as evaluator:
        single = evaluator.measure(chunks[:1], reference[:1], t1=0.7, t2=0.9)
    with Evaluator(models.tiny_tiers("f16", "tq2_0"), ENGINE) as evaluator:
        wide = evaluator.measure(chunks[:1], reference[:1], t1=0.7, t2=0.9)
    assert single.mean_kl == pytest.approx(wide.mean_kl, rel=1e-3)
    assert single.share_low == pytest.approx(wide.share_low, abs=2e-3)
    assert wide.mean_kl > 1e-3


def test_lower_precision_costs_more_and_asks_for_less(
    opened: Evaluator, chunks: list[Chunk], reference: np.ndarray
) -> None:
    steps = [opened.measure(chunks, reference, t1=t1, t2=t2) for t1, t2 in ((1, 1), (0.7, 1), (0, 1), (0, 0))]
    divergences = [step.mean_kl for step in steps]
    sizes = [step.bytes_per_token for step in steps]
    assert divergences == sorted(divergences)
    assert sizes == sorted(sizes, reverse=True)
    assert steps[2].share_high == steps[3].share_high == 0.5


def test_a_random_choice_of_the_same_mix_has_its_shares_and_costs_more(
    opened: Evaluator, chunks: list[Chunk], reference: np.ndarray
) -> None:
    chosen = opened.measure(chunks, reference, t1=0.7, t2=1.0)
    with Evaluator(models.tiny_tiers("f16", "tq2_0"), ENGINE, "random") as evaluator:
        by_chance = evaluator.measure(chunks, reference, t1=chosen.share_high, t2=1.0)
        all_low = evaluator.measure(chunks, reference, t1=0.0, t2=1.0)
    assert by_chance.share_high == pytest.approx(chosen.share_high, abs=0.03)
    assert by_chance.mean_kl > 1.5 * chosen.mean_kl
    assert all_low.share_low == 1


def test_what_an_observer_raises_comes_out(
    opened: Evaluator, chunks: list[Chunk], reference: np.ndarray
) -> None:
    def fail(_event: LayerEvent) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), opened.observing(fail):
        opened.measure(chunks, reference)
    assert opened.measure(chunks[:1], reference[:1]).mean_kl == 0


def test_progress_counts_tokens(opened: Evaluator, chunks: list[Chunk], reference: np.ndarray) -> None:
    counts: list[int] = []
    opened.measure(chunks, reference, counts.append)
    assert counts == [128] * N_CHUNKS


def test_a_chunk_begins_as_a_text_does(opened: Evaluator) -> None:
    text = TEXT.read_text()
    chunks = opened.chunks(text)
    assert len(chunks) == opened.count_tokens(text) // 128
    assert {chunk[0] for chunk in chunks} == {chunks[0][0]}
    assert opened.chunks(text, 3) == [chunks[i * len(chunks) // 3] for i in range(3)]
    assert opened.chunks("x") == []


def test_a_model_that_computes_nan_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    shutil.copyfile(models.tiny_tiers("f16", "tq2_0"), model)
    norm = next(each for each in read_gguf(model).tensors if each.name == "output_norm.weight")
    with model.open("r+b") as file:
        file.seek(norm.offset)
        file.write(np.float32(np.nan).tobytes())
    with pytest.raises(HobbitError, match="computes NaN: some of its weights are no finite numbers"):
        calibrate(model, TEXT, CalibrationConfig(EngineConfig(n_ctx=32, n_threads=1), rule="gate"))


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    write_dense_llama(path)
    with pytest.raises(HobbitError, match="dense model"), Evaluator(path):
        pass


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HobbitError, match="does not exist"), Evaluator(tmp_path / "none.gguf"):
        pass
