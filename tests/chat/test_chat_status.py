# SPDX-License-Identifier: MIT
"""The lines of figures: of the model, and below an answer."""

from dataclasses import replace
from typing import Any

from fake_engine import MODEL

from pyhobbit import CacheStats, Stats
from pyhobbit.chat.session import answer_figures, model_figures


def _figures(finish: Any = "stop", info: dict[str, Any] | None = None, **cache: int) -> str:
    model = replace(MODEL, **(info or {}))
    stats = Stats(
        model,
        CacheStats(**cache),
        0.1,
        3 << 30,
        answers=1,
        prompt_tokens_evaluated=4,
        generated_tokens=16,
        decoded_tokens=15,
        first_tokens_s=0.5,
        decode_s=3.0,
    )
    return " | ".join(answer_figures(stats, finish, 20))


def test_the_figures_of_an_answer_are_its_own() -> None:
    assert _figures(
        info={"memory": 8 << 30, "pool_bytes_low": 1},
        selections_high=6,
        selections_low=3,
        selections_skipped=1,
        hits_high=3,
        misses_high=1,
        bytes_read=20 << 20,
    ) == (
        "16 tokens | 5.0 token/s | experts 60 % high, 30 % low, 10 % skipped | "
        "75 % from memory, 1.0 MiB/token from disk | context 20 of 512"
    )


def test_figures_that_were_not_measured_are_left_out() -> None:
    assert _figures("length").startswith("16 tokens (max_tokens) | ")
    model = replace(MODEL, cached=False, has_experts=False)
    nothing = Stats(model, CacheStats(), 0.1, 1 << 20)
    figures = [
        "stopped while reading the prompt: /retry goes on, /undo forgets the question",
        "context 20 of 512",
    ]
    assert answer_figures(nothing, "interrupted", 20) == figures
    one = replace(nothing, generated_tokens=1)
    assert answer_figures(one, "stop", 20)[0] == "1 token"


def test_full_precision_needs_no_figures() -> None:
    assert "high" not in _figures(selections_high=6)
    assert "full precision" in model_figures(MODEL, False)
    assert "t1 0.5, t2 0.9" in model_figures(replace(MODEL, precision="t1 0.5, t2 0.9"), False)


def test_the_room_for_experts_is_told() -> None:
    model = replace(MODEL, n_all_experts=32, pool_slots_high=7, pool_bytes_high=3 << 20)
    assert model_figures(model, False)[3] == "experts in memory: 7 of 32 (3.0 MiB)"
    whole = replace(model, pool_slots_high=32)
    assert model_figures(whole, False)[3] == "experts in memory: all 32 (3.0 MiB)"
    both = replace(model, pool_slots_low=32, pool_bytes_low=1 << 20)
    assert model_figures(both, False)[3] == "experts in memory: high 7 of 32 (3.0 MiB), low all 32 (1.0 MiB)"


def test_a_context_that_was_chosen_is_told() -> None:
    assert "context 512 tokens (by memory)" in model_figures(MODEL, True)
    assert "context 512 tokens" in model_figures(MODEL, False)
    limited = replace(MODEL, n_ctx_train=512)
    assert "context 512 tokens (what the model was trained for)" in model_figures(limited, True)
