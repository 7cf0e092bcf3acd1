# SPDX-License-Identifier: MIT
"""Speculation: what it costs and brings to compute drafted tokens in one pass with the last token.

    python bench/speculation.py                                             # the tiny model
    python bench/speculation.py --model MODEL.gguf --random --kinds copy    # random weights

Drafts are what followed the same n-gram earlier in the text; "governed" chooses their number as the engine
does. "plain" and "copy" are given texts, a held-out one and a document that comes twice: their tokens decide
which drafts are accepted, so that every width decodes the same. "perfect" is the copy with drafts that are
always right: no other draft brings more. "own" is the model's own greedy text, which may differ with the
width, since kernels for several rows round in another order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from loops import add_model_and_text, prompts
from quality import convert
from starts import pools_for

from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.bench.tokens import random_tokens
from pyhobbit.engine.drafts import Governor, Lookup
from pyhobbit.engine.llama import Context, Model
from pyhobbit.engine.threads import computing_threads
from pyhobbit.native.files import read_text
from pyhobbit.settings.config import CacheConfig

COLUMNS = ("experts in memory", "text", "drafts", "accepted", "tokens per pass", "ms per pass")
COLUMNS += ("MB per token", "token/s", "to none", "same text")
KINDS = ("plain", "copy", "perfect", "own")
MOST = 7  # drafts that the governor may choose

Draft = Callable[[Sequence[int], int], list[int]]
"""The next tokens, given those since the last call, and how many are wanted."""


@dataclass(frozen=True)
class Text:
    """given: what follows the prompt, or None for what the model likes best."""

    prompt: list[int]
    given: list[int] | None


@dataclass(frozen=True)
class Run:
    tokens: list[int]
    seconds: float
    n_bytes: int
    n_passes: int
    n_drafted: int
    n_accepted: int


class Verifier(Context):
    """One sequence, with the logits after every token of a pass."""

    def best(self, tokens: Sequence[int]) -> list[int]:
        """Appends tokens; the best next one after each."""
        self.verify(tokens)
        return [int(best) for best in self.last_logits(len(tokens)).argmax(axis=1)]


@contextmanager
def opened(path: Path, pools: int, n_ctx: int, width: int) -> Iterator[Verifier]:
    """A model with empty pools."""

    def set_context(params: Any, _model: Model) -> None:
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = 512
        params.n_outputs_max = width + 1
        params.n_threads = params.n_threads_batch = computing_threads(None)

    model = Model(path, CacheConfig(pools=pools, t1=1.0, t2=1.0).settings(), lambda _share: True)
    context = Verifier(model, set_context, lambda: False)
    try:
        yield context
    finally:
        context.close()
        model.close()


def prompt_lookup(text: list[int]) -> Draft:
    """Of llama-cpp-python, which looks up single tokens where longer n-grams are new."""
    tokens = list(text)

    def draft(new: Sequence[int], n: int) -> list[int]:
        tokens.extend(new)
        found = LlamaPromptLookupDecoding(3, n)(np.array(tokens, np.intc)) if n else ()
        return [int(token) for token in found]

    return draft


def lookup(text: list[int]) -> Draft:
    """The engine's."""
    table = Lookup(text)

    def draft(new: Sequence[int], n: int) -> list[int]:
        table.extend(new)
        return table.draft(n)

    return draft


def perfect(text: Text) -> Draft:
    """Knows what is given."""
    place, given = 0, text.given or []

    def draft(new: Sequence[int], n: int) -> list[int]:
        nonlocal place
        place += len(new)
        return given[place : place + n]

    return draft


def decode(context: Verifier, text: Text, draft: Draft, width: int | None, n_tokens: int) -> Run:
    """After the prompt, of which the last token is the first that is computed with drafts.

    width: None is governed.
    """
    context.evaluate(text.prompt[:-1])
    tokens, new = list(text.prompt), list[int]()
    n_passes = n_drafted = n_accepted = 0
    governor = Governor(MOST) if width is None else None
    before, start = context.model.cache.stats().bytes_read, time.perf_counter()
    while (n_done := len(tokens) - len(text.prompt)) < n_tokens:
        wanted = min(governor.width if governor else width or 0, n_tokens - n_done - 1)
        drafted = draft(new, wanted)
        pass_start = time.perf_counter()
        best = context.best([tokens[-1], *drafted])
        pass_s = time.perf_counter() - pass_start
        if text.given is not None:
            best = text.given[n_done : n_done + len(best)]
        n_right = next((i for i, each in enumerate(drafted) if each != best[i]), len(drafted))
        if governor:
            governor.note(len(drafted), n_right, pass_s)
        new = best[: n_right + 1]
        tokens += new
        context.truncate(len(tokens) - 1)
        n_passes, n_drafted, n_accepted = n_passes + 1, n_drafted + len(drafted), n_accepted + n_right
    seconds = time.perf_counter() - start
    n_bytes = context.model.cache.stats().bytes_read - before
    return Run(tokens[len(text.prompt) :], seconds, n_bytes, n_passes, n_drafted, n_accepted)


def documents(model: Model, source: str | None, n: int, n_tokens: int) -> list[list[int]]:
    """n texts of n_tokens: pieces of the source, or random tokens."""
    if source is None:
        draw = random_tokens(model.n_vocab())
        return [list(islice(draw, n_tokens)) for _ in range(n)]
    return [model.tokenize(each)[:n_tokens] for each in prompts(source, n, 8 * n_tokens)]


def as_kind(kind: str, document: list[int], n_prompt: int) -> Text:
    """Of a document with n_prompt tokens and those that are decoded."""
    if kind in ("copy", "perfect"):
        n_tokens = len(document) - n_prompt
        once = document[: max(n_prompt, n_tokens + 1)]
        return Text([*once, once[0]], once[1 : n_tokens + 1])
    return Text(document[:n_prompt], document[n_prompt:] if kind == "plain" else None)


def row(share: float, kind: str, width: int | None, runs: list[list[Run]], none: list[list[Run]]) -> str:
    """runs: of each text, by repetition. Times are medians of a text's repetitions."""
    every = [run for each in runs for run in each]
    n_tokens, n_passes, n_drafted, n_accepted, n_bytes = (
        sum(figures) / len(runs[0])
        for figures in zip(
            *((len(run.tokens), run.n_passes, run.n_drafted, run.n_accepted, run.n_bytes) for run in every),
            strict=True,
        )
    )
    seconds, base = (sum(median(run.seconds for run in each) for each in group) for group in (runs, none))
    n_same = sum(each[0].tokens == other[0].tokens for each, other in zip(runs, none, strict=True))
    cells = (
        f"{share:.0%}",
        kind,
        "governed" if width is None else str(width) if width else "none",
        f"{n_accepted / n_drafted:.0%} of {n_drafted:.0f}" if n_drafted else "",
        f"{n_tokens / n_passes:.2f}",
        f"{1e3 * seconds / n_passes:.1f}",
        f"{n_bytes / n_tokens / 1e6:.2f}",
        f"{n_tokens / seconds:.1f}",
        f"{base / seconds:.2f}",
        f"{n_same} of {len(runs)}",
    )
    return table_row(cells)


def main() -> None:
    parser = option_parser(__doc__)
    add = parser.add_argument
    add_model_and_text(parser)
    add("--random", action="store_true", help="a text of random tokens, for a model of random weights")
    add("--shares", type=float, nargs="+", default=[0.25, 1.0], help="of the experts that the pools hold")
    add("--widths", type=int, nargs="+", default=[1, 2, 3, 7], help="drafts per pass")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--prompt-lookup", action="store_true", help="drafts of llama-cpp-python")
    add("--texts", type=int, default=4, help="of each kind (default: %(default)s)")
    add("--prompt", type=int, default=128, help="tokens (default: %(default)s)")
    add("--tokens", type=int, default=128, help="decoded after it (default: %(default)s)")
    add("--reps", type=int, default=3, help="repetitions (default: %(default)s)")
    args = parser.parse_args()
    path = (args.model or convert("f16", "q4_0")).absolute()
    source = None if args.random else read_text(args.text)
    print(f"{path.name}\n\n{table_head(COLUMNS)}")
    widths = (0, *args.widths, None)
    look_up = prompt_lookup if args.prompt_lookup else lookup
    n_ctx = max(args.prompt, args.tokens + 1) + args.tokens + MOST + 1
    for share in args.shares:
        with opened(path, pools_for(share, path), n_ctx, max(MOST, *args.widths)) as context:
            given = documents(context.model, source, args.texts, args.prompt + args.tokens)
            for kind in args.kinds:
                cases = [as_kind(kind, document, args.prompt) for document in given]
                runs: dict[int | None, list[list[Run]]] = {width: [[] for _ in cases] for width in widths}
                for _ in range(args.reps):
                    for i, text in enumerate(cases):
                        for width in widths:
                            context.truncate(0)
                            draft = perfect(text) if kind == "perfect" else look_up(text.prompt)
                            runs[width][i].append(decode(context, text, draft, width, args.tokens))
                for width in widths:
                    print(row(share, kind, width, runs[width], runs[0]), flush=True)


if __name__ == "__main__":
    main()
