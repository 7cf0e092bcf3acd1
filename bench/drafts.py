# SPDX-License-Identifier: MIT
"""What drafts bring through chat's engine, the server and Python: each against the same without drafts.

    python bench/drafts.py                                      # the tiny model
    python bench/drafts.py --temperature 0.8 --kinds plain      # few drafts are right

Every text is the model's own, greedy by default: after pieces of held-out text ("plain"), or after a piece
that comes twice and begins a third time ("repetitive"). Both arms are open at the same time and take turns,
text by text, now one first and now the other. Each repetition has texts of its own, since llama-server's
n-grams remember earlier answers. bench/speculation.py has given texts and fixed widths in their place.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from accuracy import serving
from loops import add_model_and_text, prompts
from quality import convert
from starts import pools_for

from pyhobbit import Hobbit, TextDrafts
from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.engine.engine import Engine
from pyhobbit.native.files import read_text
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig

COLUMNS = ("through", "experts in memory", "text", "accepted", "drafts per pass", "MB per token")
COLUMNS += ("token/s", "to none", "least - most", "same text")
KINDS = ("plain", "repetitive")
MOST = 7  # drafts that the governor may choose
N_CTX = 512
N_GRAM = ("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", 3)  # as docs/server.md has it
N_GRAM += ("--spec-ngram-mod-n-min", 1, "--spec-ngram-mod-n-max", 3)


@dataclass(frozen=True)
class Answer:
    """seconds: of all tokens but the first."""

    text: str
    n_tokens: int
    seconds: float
    n_bytes: int
    n_drafted: int
    n_accepted: int


Ask = Callable[[str, int, float], Answer]
"""The answer to a prompt, of so many tokens, drawn at a temperature."""


@contextmanager
def chat(model: Path, pools: int, drafts: bool) -> Iterator[Ask]:
    config = EngineConfig(CacheConfig(pools=pools), n_ctx=N_CTX, n_drafts=MOST if drafts else 0)
    with Engine(model, config) as engine:

        def ask(prompt: str, n_tokens: int, temperature: float) -> Answer:
            stream = engine.generate(prompt, n_tokens, SamplingConfig(temp=temperature, seed=1))
            pieces = [next(stream)]
            before = engine.stats()
            pieces += stream
            after = engine.stats()
            return Answer(
                "".join(piece.text for piece in pieces),
                len(pieces),
                pieces[-1].time_s - pieces[0].time_s,
                after.cache.bytes_read - before.cache.bytes_read,
                after.drafted_tokens - before.drafted_tokens,
                after.accepted_tokens - before.accepted_tokens,
            )

        yield ask


@contextmanager
def python(model: Path, pools: int, drafts: bool) -> Iterator[Ask]:
    drafter = TextDrafts(MOST) if drafts else None
    with Hobbit(str(model), pools=pools, n_ctx=N_CTX, draft_model=drafter, verbose=False) as llm:

        def ask(prompt: str, n_tokens: int, temperature: float) -> Answer:
            before = (drafter.n_drafted, drafter.n_accepted) if drafter else (0, 0)
            found, times, n_bytes = list[int](), list[float](), 0
            llm.set_seed(1)
            for token in llm.generate(llm.tokenize(prompt.encode()), temp=temperature):
                times.append(time.perf_counter())
                n_bytes = n_bytes or llm.stats().cache.bytes_read
                found.append(token)
                if len(found) == n_tokens or token == llm.token_eos():
                    break
            n_bytes = llm.stats().cache.bytes_read - n_bytes
            after = (drafter.n_drafted, drafter.n_accepted) if drafter else (0, 0)
            counts = (b - a for a, b in zip(before, after, strict=True))
            text = llm.detokenize(found).decode(errors="replace")
            return Answer(text, len(found), times[-1] - times[0], n_bytes, *counts)

        yield ask


@contextmanager
def server(model: Path, pools: int, drafts: bool) -> Iterator[Ask]:
    settings = {"hobbit.enable": True, "hobbit.pools": pools}
    with serving(model, settings, N_CTX, N_GRAM if drafts else ()) as url:

        def call(path: str, body: object = None) -> Any:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as reply:
                return json.load(reply)

        def ask(prompt: str, n_tokens: int, temperature: float) -> Answer:
            body = {"prompt": prompt, "n_predict": 1, "temperature": temperature, "seed": 1}
            call("/completion", body)  # reads the prompt
            before = call("/hobbit")["bytes_read"]
            answer = call("/completion", {**body, "n_predict": n_tokens})
            timings = answer["timings"]
            return Answer(
                answer["content"],
                timings["predicted_n"],
                timings["predicted_ms"] / 1000,
                call("/hobbit")["bytes_read"] - before,
                timings.get("draft_n", 0),
                timings.get("draft_n_accepted", 0),
            )

        yield ask


WAYS = {"chat": chat, "server": server, "Python": python}


def texts(source: str, kind: str, n: int, n_characters: int) -> list[str]:
    """Prompts."""
    pieces = prompts(source, n, n_characters)
    return pieces if kind == "plain" else [f"{piece}\n{piece}\n{piece[:40]}" for piece in pieces]


def row(way: str, share: float, kind: str, runs: list[tuple[list[Answer], list[Answer]]]) -> str:
    """runs: by repetition, the answers without and with drafts. Medians of the repetitions."""

    def speed(answers: list[Answer]) -> float:
        return sum(each.n_tokens - 1 for each in answers) / sum(each.seconds for each in answers)

    def megabytes(answers: list[Answer]) -> float:
        return sum(each.n_bytes for each in answers) / sum(each.n_tokens - 1 for each in answers) / 1e6

    ratios = [speed(drafts) / speed(none) for none, drafts in runs]
    every = [each for _, drafts in runs for each in drafts]
    n_drafted, n_accepted = sum(each.n_drafted for each in every), sum(each.n_accepted for each in every)
    n_passes = sum(each.n_tokens - 1 for each in every) - n_accepted
    pairs = [pair for none, drafts in runs for pair in zip(none, drafts, strict=True)]
    cells = (
        way,
        f"{share:.0%}",
        kind,
        f"{n_accepted / n_drafted:.0%} of {n_drafted / len(runs):.0f}" if n_drafted else "",
        f"{n_drafted / n_passes:.2f}",
        " -> ".join(f"{median(megabytes(run[i]) for run in runs):.2f}" for i in (0, 1)),
        " -> ".join(f"{median(speed(run[i]) for run in runs):.0f}" for i in (0, 1)),
        f"{median(ratios):.2f}",
        f"{min(ratios):.2f} - {max(ratios):.2f}",
        f"{sum(a.text == b.text for a, b in pairs)} of {len(pairs)}",
    )
    return table_row(cells)


def main() -> None:
    parser = option_parser(__doc__)
    add = parser.add_argument
    add_model_and_text(parser)
    add("--through", nargs="+", choices=WAYS, default=list(WAYS))
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--shares", type=float, nargs="+", default=[0.25, 1.0], help="of the experts that the pools hold")
    add("--texts", type=int, default=4, help="of each kind and repetition (default: %(default)s)")
    add("--characters", type=int, default=300, help="of a piece of text (default: %(default)s)")
    add("--tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    add("--temperature", type=float, default=0.0)
    add("--reps", type=int, default=5, help="repetitions (default: %(default)s)")
    args = parser.parse_args()
    model, source = (args.model or convert("f16", "q4_0")).absolute(), read_text(args.text)
    print(f"{model.name}\n\n{table_head(COLUMNS)}", flush=True)
    for way in args.through:
        for share in args.shares:
            with ExitStack() as stack:
                pools = pools_for(share, model)
                asks = [stack.enter_context(WAYS[way](model, pools, drafts)) for drafts in (False, True)]
                for kind in args.kinds:
                    starts = texts(source, kind, args.texts * args.reps, args.characters)
                    runs: list[tuple[list[Answer], list[Answer]]] = []
                    for i in range(args.reps):
                        runs.append(([], []))
                        for j, prompt in enumerate(starts[i :: args.reps]):
                            arms = list(zip(runs[-1], asks, strict=True))
                            for answers, ask in arms if j % 2 else reversed(arms):
                                answers.append(ask(prompt, args.tokens, args.temperature))
                    print(row(way, share, kind, runs), flush=True)


if __name__ == "__main__":
    main()
