# SPDX-License-Identifier: MIT
"""Lines of figures: below an answer, and of the model."""

from pathlib import Path

from pyhobbit._tables import COUNTERS
from pyhobbit.engine.engine import Finish
from pyhobbit.engine.stats import ModelInfo, Stats
from pyhobbit.settings.config import counted_tokens, format_size

_ENDS: dict[Finish | None, str] = {
    "length": " (max_tokens)",
    "context": " (context full)",
    "interrupted": " (interrupted)",
}


def answer_figures(stats: Stats, finish: Finish | None, n_context: int) -> list[str]:
    """Parts of the line. stats: of this answer alone (Stats.since).  n_context: tokens in the context."""
    parts = [counted_tokens(stats.generated_tokens) + _ENDS.get(finish, "")]
    if finish == "interrupted" and not stats.generated_tokens:
        parts = ["stopped while reading the prompt: /retry goes on, /undo forgets the question"]
    if (rate := stats.decode_tokens_per_second) is not None:
        parts.append(f"{rate:.1f} token/s")
    if stats.drafted_tokens:
        parts.append(f"{stats.accepted_tokens} of {stats.drafted_tokens} drafts right")
    if stats.info.cached:
        parts += _cache_figures(stats)
    return [*parts, f"context {n_context} of {stats.info.n_ctx}"]


def model_figures(info: ModelInfo, chose_context: bool) -> list[str]:
    """Figures of the opened model. chose_context: the engine chose the size of the context."""
    parts = [Path(info.model).name, info.description, f"context {info.context_text(chose_context)}"]
    if info.cached:
        parts += [f"experts in memory: {', '.join(info.pool_texts())}", info.precision or "full precision"]
    return parts


def _cache_figures(stats: Stats) -> list[str]:
    cache, found = stats.cache, stats.cache.rates
    parts = []
    if found.low_share or found.skipped_share:
        shares = (found.high_share, found.low_share, found.skipped_share)
        high, low, skipped = (f"{100 * (share or 0):.0f} %" for share in shares)
        parts.append(f"experts {high} high, {low} low, {skipped} skipped")
    tokens = (each.name for each in COUNTERS if each.name.startswith("tokens_"))  # some mechanisms count them
    parts += [f"{n} {name.replace('_', ' ')}" for name in tokens if (n := getattr(cache, name))]
    hits, read = found.hit_rate, stats.bytes_read_per_token
    if hits is not None and read is not None:
        parts.append(f"{100 * hits:.0f} % from memory, {format_size(read)}/token from disk")
    return parts
