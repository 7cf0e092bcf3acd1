# SPDX-License-Identifier: MIT
"""Whether lossy settings make a model repeat itself: loops in long generated texts, beside all high.

    python bench/loops.py                          # the tiny model, q8_0 + q2_k, calibrated with KL <= 0.01
    python bench/loops.py --model MODEL.gguf --text my.txt --thresholds 0.6:0.9

A calibration beside the model is a setting, too. A full context goes on with its last half.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ablation import fit
from quality import TINY, convert

from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.engine.engine import Engine
from pyhobbit.model.file_names import calibration_path
from pyhobbit.native.files import read_text
from pyhobbit.quality.loops import longest_loop, repeated_share
from pyhobbit.settings.config import (
    CacheConfig,
    EngineConfig,
    SamplingConfig,
    Setting,
    parse_size,
)

COLUMNS = ("setting", "temperature", "repeated 8-grams", "texts with a loop", "longest loop")
PROMPT_CHARACTERS = 400
MAX_KL = 0.01  # of the tiny model's calibration


@dataclass(frozen=True)
class Strict(CacheConfig):
    """Each token gets exactly the precision decided for it, whatever is resident."""

    def settings(self) -> dict[str, Setting]:
        return {**super().settings(), "hobbit.strict": True}


def calibrated_tiny() -> Path:
    """The tiny model with a calibration beside it, in a folder of its own: others measure without."""
    source = convert("q8_0", "q2_k")
    model = source.parent / "loops" / source.name
    if not calibration_path(model).exists():
        model.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, model)
        fit(model, n_chunks=8, max_kl=MAX_KL).write(model)
    return model


def arms(model: Path, thresholds: Sequence[str], pools: int | None) -> dict[str, Strict]:
    """By what they are called."""
    found = {"all high": Strict(pools=pools, t1=1.0, t2=1.0)}
    if calibration_path(model).exists():
        found["calibrated"] = Strict(pools=pools)
    for pair in thresholds:
        t1, t2 = map(float, pair.split(":"))
        found[f"t1 = {t1:g}, t2 = {t2:g}"] = Strict(pools=pools, t1=t1, t2=t2)
    return {**found, "all low": Strict(pools=pools, t1=0.0, t2=1.0, rule="random")}


def prompts(text: str, n: int, n_characters: int = PROMPT_CHARACTERS) -> list[str]:
    """Pieces of a text, evenly spaced, from the begin of a line on."""
    starts = [text.find("\n", i * len(text) // n) + 1 for i in range(n)]
    return [text[start : start + n_characters] for start in starts]


def add_model_and_text(parser: argparse.ArgumentParser) -> None:
    """What is generated with, and from."""
    parser.add_argument("--model", type=Path, help="(default: the tiny model)")
    text = TINY / "heldout.txt"
    parser.add_argument("--text", type=Path, default=text, help="for prompts (default: the held-out text)")


def generate(engine: Engine, prompt: str, n_tokens: int, sampling: SamplingConfig) -> list[int]:
    """Fewer tokens if the model ends its text."""
    tokens: list[int] = []
    text = prompt
    while len(tokens) < n_tokens:
        pieces = list(engine.generate(text, n_tokens - len(tokens), sampling))
        tokens += [piece.token for piece in pieces if piece.token is not None]
        text += "".join(piece.text for piece in pieces)
        if pieces[-1].finish == "stop":
            break
        text = text[len(text) // 2 :]
    return tokens


def row(name: str, temperature: float, texts: Sequence[Sequence[int]]) -> str:
    loops = [loop for loop in map(longest_loop, texts) if loop is not None]
    longest = max(loops, key=lambda loop: loop.length, default=None)
    cells = (
        name,
        f"{temperature:g}",
        f"{sum(map(repeated_share, texts)) / len(texts):.1%}",
        f"{len(loops)} of {len(texts)}",
        f"{longest.length} tokens, period {longest.period}" if longest else "none",
    )
    return table_row(cells)


def main() -> None:
    parser = option_parser(__doc__)
    add = parser.add_argument
    add_model_and_text(parser)
    add("--thresholds", nargs="+", default=["0.638:0.968", "0:0.749"], metavar="T1:T2")
    add("--temperatures", type=float, nargs="+", default=[0.8, 0.0])
    add("--texts", type=int, default=8, help="of each setting (default: %(default)s)")
    add("--tokens", type=int, default=1500, help="of each text (default: %(default)s)")
    add("--pools", type=parse_size, help="size of the expert cache (default: all that is free)")
    add("--threads", type=int)
    args = parser.parse_args()
    model, pools = args.model or calibrated_tiny(), args.pools
    if args.model is None:
        pools = pools or 64_000_000  # all experts fit
    starts = prompts(read_text(args.text), args.texts)
    print(f"{model.name}, {args.texts} texts of {args.tokens} tokens\n")
    print(table_head(COLUMNS))
    for name, cache in arms(model, args.thresholds, pools).items():
        with Engine(model, EngineConfig(cache, n_threads=args.threads)) as engine:
            for temperature in args.temperatures:
                texts = [
                    generate(engine, prompt, args.tokens, SamplingConfig(temp=temperature, seed=seed))
                    for seed, prompt in enumerate(starts)
                ]
                print(row(name, temperature, texts), flush=True)


if __name__ == "__main__":
    main()
