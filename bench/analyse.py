# SPDX-License-Identifier: MIT
"""The analyses of the HOBBIT paper on a model and a text: one JSON document, and with --plots a PNG for each.

    python -m bench.analyse MODEL.gguf --text my.txt --plots plots --threads 1

The model runs on the text in high precision, and then with the least important experts in low precision,
where there is a low tier, and skipped.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.analysis import findings
from bench.analysis.figures import threshold_for_share
from bench.analysis.findings import Cost, Findings
from bench.tables import option_parser
from pyhobbit.cli.main import with_options
from pyhobbit.cli.options import add_engine_arguments, engine_config
from pyhobbit.errors import HobbitError
from pyhobbit.model.model_file import ModelFile, opened_info, read_model_file
from pyhobbit.model.names import check_model_file
from pyhobbit.native.files import read_text
from pyhobbit.quality import evaluate
from pyhobbit.quality.evaluate import Chunk, Evaluator
from pyhobbit.routing.observe import Observations, Recorder
from pyhobbit.settings.config import CacheConfig, EvaluationConfig
from pyhobbit.settings.resolve import check_settings
from pyhobbit.settings.table import OPTIONS

_MAX_INPUT_BYTES = 256 << 20  # bytes of routers' inputs
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)  # shares of selections, replaced or skipped


def analyse(
    model: ModelFile, text: str, config: EvaluationConfig, n_chunks: int, thresholds: tuple[float, float]
) -> tuple[Findings, Observations]:
    """Runs the model on at most n_chunks parts of the text. Raises HobbitError when the text is too short."""
    with Evaluator(model.path, config) as evaluator:
        chunks, n_in_text = _chunks(evaluator, text, n_chunks)
        n_tokens = len(chunks) * evaluator.n_ctx
        recorder = Recorder(len(chunks), evaluator.n_ctx, evaluator.info.n_layers, _MAX_INPUT_BYTES)
        with tqdm(desc="observing", total=n_tokens) as bar, evaluator.observing(recorder):
            reference = evaluator.reference(chunks, bar.update)
        seen = recorder.observations()
        blocks = [model.blocks[layer] for layer in seen.layers]
        found = findings.find(seen, model.routers(blocks), model.n_experts, *thresholds)
        cost = []
        if found.gates is not None:
            cost = _measure_cost(evaluator, chunks, reference, found.gates.scores)
        measured: dict[str, Any] = {
            "perplexity": evaluate.perplexity(reference, chunks),
            "confident": evaluate.confident_share(reference, findings.CONFIDENT),
        }
    return replace(found, blocks=blocks, n_in_text=n_in_text, cost=cost, **measured), seen


def choose_thresholds(
    t1: float | None, t2: float | None, own_t1: float, own_t2: float
) -> tuple[float, float]:
    """The thresholds to show; own_t1, own_t2: the model's."""
    if own_t1 >= 1:
        own_t1, own_t2 = CacheConfig.paper_t1, CacheConfig.paper_t2
    if t1 is not None:
        return t1, max(t1, own_t2) if t2 is None else t2
    return (own_t1, own_t2) if t2 is None else (min(own_t1, t2), t2)


def _chunks(evaluator: Evaluator, text: str, at_most: int) -> tuple[list[Chunk], int]:
    """Chunks evenly spaced over the text, and how many it has."""
    chunks = evaluator.chunks(text)
    if not chunks:
        raise HobbitError(f"the text has fewer than {evaluator.n_ctx} tokens; give a longer one")
    n = min(len(chunks), at_most)
    return [chunks[i * len(chunks) // n] for i in range(n)], len(chunks)


def _measure_cost(
    evaluator: Evaluator, chunks: list[Chunk], reference: np.ndarray, scores: np.ndarray
) -> list[Cost]:
    """Perplexity with the least important experts in low precision, where there is one, and skipped."""
    # The best expert of a token is always in high precision.
    n_best = np.count_nonzero(scores == 0, axis=1).min()
    shares = [share for share in _SHARES if share <= 1 - n_best / scores.shape[1]]
    n_passes = len(shares) * (2 if evaluator.has_low_tier else 1)
    cost: list[Cost] = []
    with tqdm(desc="skipping and replacing", total=n_passes * sum(map(len, chunks))) as bar:
        for share in shares:
            t = threshold_for_share(scores, share)
            replaced = (
                evaluator.measure(chunks, t, 1, reference, bar.update) if evaluator.has_low_tier else None
            )
            cost.append(Cost(share, t, replaced, evaluator.measure(chunks, t, t, reference, bar.update)))
    return cost


def run(args: argparse.Namespace) -> None:
    """Raises HobbitError."""
    if args.chunks < 1:
        raise HobbitError(f"--chunks is {args.chunks}; it must be positive")
    engine = engine_config(args, None, without=("t1", "t2", "trace", "remember"))
    check_settings(CacheConfig(t1=args.t1, t2=args.t2).settings())
    text = read_text(args.text)
    if args.plots is not None:
        from bench.analysis import plots

        try:
            args.plots.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise HobbitError(
                f"{args.plots} cannot be a folder of plots ({e.strerror}); choose another one"
            ) from e
    check_model_file(args.model)
    info = opened_info(args.model, {"hobbit.enable": True, **engine.cache.settings()})
    model = read_model_file(args.model, engine.cache.sidecar)
    thresholds = choose_thresholds(args.t1, args.t2, info.t1, info.t2)
    found, seen = analyse(model, text, EvaluationConfig(engine=engine), args.chunks, thresholds)
    print(json.dumps(found.as_dict(), indent=2))
    if args.plots is not None:
        print(f"{len(plots.write(found, seen, args.plots))} plots in {args.plots}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Analyses; returns the exit status."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="GGUF file; of a split model its first file")
    add("--text", type=Path, required=True, metavar="FILE", help="text to run the model on")
    add("--plots", type=Path, metavar="DIR", help="folder for the plots")
    chunks = "parts of 512 tokens to use at most, evenly spaced (default: %(default)s)"
    add("--chunks", type=int, default=16, metavar="N", help=chunks)
    paper = {"t1": CacheConfig.paper_t1, "t2": CacheConfig.paper_t2}
    defaults = {name: f"the model's, or {value}" for name, value in paper.items()}
    add_engine_arguments(
        parser, [name for name in OPTIONS if name not in ("trace", "timeline", "remember")], defaults
    )
    try:
        run(parser.parse_args(arguments))
    except HobbitError as e:
        print(f"analyse: {with_options(str(e))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
