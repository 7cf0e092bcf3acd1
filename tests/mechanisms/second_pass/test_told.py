# SPDX-License-Identifier: MIT
"""Second passes among the figures of an answer."""

from pyhobbit import CacheStats, Stats
from pyhobbit.chat.session import answer_figures
from pyhobbit.engine.stats import ModelInfo

MODEL = ModelInfo(model="m.gguf", description="llama", n_ctx=512, n_threads=2, cached=True, has_experts=True)


def _figures(**cache: int) -> list[str]:
    stats = Stats(MODEL, CacheStats(**cache), 0.1, 3 << 30, answers=1, generated_tokens=16)
    return answer_figures(stats, "stop", 20)


def test_second_passes_are_told() -> None:
    figures = _figures(selections_high=6, tokens_repeated=4)
    assert [each for each in figures if each.startswith("4 ")] == ["4 tokens repeated"]
    assert "repeated" not in " ".join(_figures(selections_high=6))
