# SPDX-License-Identifier: MIT
"""What reading into the pools between two turns brings: loads of the second turn, without and with it.

    python bench/turns.py                        # the tiny model's routing, simulated
    python bench/turns.py --trace TRACE.csv      # a recorded routing
    python bench/turns.py --engine               # the tiny model in the engine

A first turn is a prompt, read in one pass, and an answer. Then the pools are as the answer left them, or
refilled with what the answer used most. The second turn is a prompt as well, and --tokens of an answer, whose
loads per token are shown. --prompts 0 goes on with the answer. A refill is a pass that chooses what is to be
read; its loads do not count, and the policy keeps what it knew.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from quality import TINY, convert
from starts import pools_for

from pyhobbit.bench import worker
from pyhobbit.bench.job import Job
from pyhobbit.bench.script import option_parser, table_head, table_row
from pyhobbit.quality.calibration import profile, routes
from pyhobbit.quality.evaluate import Evaluator
from pyhobbit.routing.trace import ROUTE, Simulation, policy_names, pool_slots, read_trace, simulate
from pyhobbit.settings.config import EngineConfig, EvaluationConfig

FIRST_PROMPT = 32
N_CTX = 640  # a chunk and a refill
_REFILL = 1 << 20  # the number of its sequence


def most_used(chosen: np.ndarray, n_experts: int, n_slots: int) -> np.ndarray:
    """The experts that a refill reads, as a pass of tokens that choose them: [tokens, layers, used].

    chosen: of the tokens before, of the same shape. Layers with fewer of them choose some twice.
    """
    _, n_layers, n_used = chosen.shape
    counts = np.stack([np.bincount(chosen[:, i].ravel(), minlength=n_experts) for i in range(n_layers)])
    order = np.argsort(-counts.ravel(), kind="stable")[:n_slots]
    by_layer = [order[order // n_experts == layer] % n_experts for layer in range(n_layers)]
    n_tokens = -(-max(map(len, by_layer)) // n_used)
    rows = []
    for layer, wanted in enumerate(by_layer):
        if len(wanted) < n_used:
            wanted = np.argsort(-counts[layer], kind="stable")[:n_used]
        rows.append(np.resize(wanted, (n_tokens, n_used)))
    return np.stack(rows, axis=1)


#
# simulation
#


def one_pass(chosen: np.ndarray) -> np.ndarray:
    """Tokens that run through the layers together, as routes that do not count."""
    ordered = chosen.transpose(1, 0, 2).copy()
    ordered["counted"] = 0
    return ordered.ravel()


def one_by_one(chosen: np.ndarray, counted: bool) -> np.ndarray:
    """Tokens that are decoded, as routes."""
    copy = chosen.copy()
    copy["counted"] = counted
    return copy.ravel()


def refill(experts: np.ndarray) -> np.ndarray:
    """The routes of a pass that chooses them, in a sequence of its own, which hardly counts for a policy."""
    n_tokens, n_layers, _ = experts.shape
    chosen = np.zeros(experts.shape, ROUTE)
    chosen["sequence"] = _REFILL
    chosen["token"] = np.arange(n_tokens)[:, None, None]
    chosen["layer"] = np.arange(n_layers)[None, :, None]
    chosen["expert"] = experts
    chosen["weight"] = 1e-6
    return one_pass(chosen)


def loads(text: np.ndarray, middle: int, n_prompt: int, n_tokens: int, base: Simulation) -> tuple[float, ...]:
    """Of the second answer, as the pools are and from refilled ones. text: ROUTE [tokens, layers, used]."""
    start = middle + n_prompt
    first = (one_pass(text[:FIRST_PROMPT]), one_by_one(text[FIRST_PROMPT:middle], counted=False))
    second = (one_pass(text[middle:start]), one_by_one(text[start : start + n_tokens], counted=True))
    read = refill(most_used(text[FIRST_PROMPT:middle]["expert"], base.n_experts, base.slots_high))
    return tuple(simulate(np.concatenate([*first, *pause, *second]), base).penalty for pause in ((), (read,)))


def print_simulated(args: argparse.Namespace, texts: list[np.ndarray], base: Simulation) -> None:
    """texts: ROUTE [tokens, layers, used], each with room for a second turn at all places of a pause."""
    heads = [f"{share:.0%}, prompt of {n}" for share in args.shares for n in args.prompts]
    print(table_head(("policy", *heads)))
    n_after = max(args.prompts) + args.tokens
    for policy in policy_names(has_prior=False):
        cells = []
        for share in args.shares:
            slots = pool_slots(base.n_layers * base.n_experts, share, 0.0, 1.0)[0]
            case = replace(base, policy=policy, slots_high=slots)
            for n_prompt in args.prompts:
                both = [
                    loads(text, middle, n_prompt, args.tokens, case)
                    for text in texts
                    for middle in range(FIRST_PROMPT + args.answer, len(text) - n_after + 1, n_after)
                ]
                cells.append(cell(np.mean(both, axis=0) / args.tokens))
        print(table_row((policy, *cells)), flush=True)


def cell(both: np.ndarray) -> str:
    return f"{both[0]:.2f} -> {both[1]:.2f} ({both[1] / both[0] - 1:+.0%})" if both[0] else "0"


#
# engine
#


class Turns(worker.Session):
    """One sequence of given tokens, in this package's llama.cpp."""

    def __init__(self, job: Job, n_ctx: int) -> None:
        libraries = worker.Libraries(None)
        super().__init__(libraries, job, n_ctx, n_ctx)
        self._counters = worker.Counters(libraries, self.model)
        self.info = self._counters.info()

    def n_misses(self) -> float:
        return self._counters.stats()["misses_high"]

    def close(self) -> None:
        self._counters.close()
        super().close()

    def compute(self, tokens: list[int], at_once: bool) -> None:
        for piece in [tokens] if at_once else [[token] for token in tokens]:
            self._decode(piece)

    def refill(self, experts: np.ndarray) -> None:
        """Reads them into the pools; the sequence stays as it was."""
        n_kept, n_tokens = self._n_past, len(experts)
        self.replay.use(experts, np.full(experts.shape, 1 / experts.shape[2], np.float32))
        batch = self.llama.llama_batch_init(n_tokens, 0, 1)
        batch.n_tokens = n_tokens
        for i in range(n_tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = 0, n_kept + i, True  # the last layer runs for all
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        self.replay.begin(n_tokens)
        status = self.llama.llama_decode(self.context, batch)
        self.llama.llama_batch_free(batch)
        self.replay.stop()
        if status or self.replay.error:
            raise worker.RunError(self.replay.error or f"llama_decode failed with status {status}")
        self.llama.llama_memory_seq_rm(self.llama.llama_get_memory(self.context), 0, n_kept, -1)


def second_turn(
    session: Turns, text: list[int], args: argparse.Namespace, n_prompt: int, read: np.ndarray
) -> tuple[float, float]:
    """Misses of its prompt and of its answer, after a first turn and a refill with `read`, if it has rows."""
    session.restart()
    middle = FIRST_PROMPT + args.answer
    start = middle + n_prompt
    session.compute(text[:FIRST_PROMPT], at_once=True)
    session.compute(text[FIRST_PROMPT:middle], at_once=False)
    if len(read):
        session.refill(read)
    before = session.n_misses()
    if n_prompt:
        session.compute(text[middle:start], at_once=True)
    between = session.n_misses()
    session.compute(text[start : start + args.tokens], at_once=False)
    return between - before, session.n_misses() - between


def print_engine(args: argparse.Namespace, model: Path, chunks: list[list[int]], seen: np.ndarray) -> None:
    """seen: experts of the chunks' tokens, [chunks, tokens, layers, used]."""
    print("| experts in memory | prompt | misses in the prompt | misses per token of the answer |")
    print("|---|---|---|---|")
    for share in args.shares:
        settings = {"hobbit.enable": True, "hobbit.prefetch": 0}
        settings["hobbit.pools"] = pools_for(share, model)
        job = Job(str(model), None, "", settings, repack=True, n_threads=args.threads, n_beams=128)
        session = Turns(job, N_CTX)
        n_slots, n_experts = int(session.info["pool_slots_high"]), int(session.info["n_experts"])
        answer = slice(FIRST_PROMPT, FIRST_PROMPT + args.answer)
        reads = [most_used(experts[answer], n_experts, n_slots) for experts in seen]
        for n_prompt in args.prompts:
            # each text comes after another one; the first round fills the pools
            rounds = [
                [
                    second_turn(session, text, args, n_prompt, read if refilled else read[:0])
                    for text, read in zip(chunks, reads, strict=True)
                ]
                for refilled in (False, False, True, False, True)
            ]
            left, refilled = (np.mean([rounds[i] for i in which], axis=(0, 1)) for which in ((1, 3), (2, 4)))
            prompt, rest = np.stack([left, refilled], axis=1)
            print(f"| {share:.0%} | {n_prompt} | {cell(prompt)} | {cell(rest / args.tokens)} |", flush=True)
        session.close()


def main() -> None:
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--trace", type=Path, help="recorded routing in place of the tiny model's")
    add("--engine", action="store_true", help="the tiny model in the engine, instead of a simulation")
    add("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="of the experts in the pools")
    add("--prompts", type=int, nargs="+", default=[0, 8, 32], help="tokens of the second one")
    add("--answer", type=int, default=128, help="tokens of the first one (default: %(default)s)")
    add("--tokens", type=int, default=16, help="of the second answer (default: %(default)s)")
    add("--chunks", type=int, default=8, help="texts of 512 tokens (default: %(default)s)")
    add("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.trace:
        trace = read_trace(args.trace)
        text = trace.routes[trace.routes["counted"] != 0].reshape(-1, trace.n_layers, trace.n_used)
        print_simulated(
            args, [text], Simulation(trace.n_layers, trace.n_experts, trace.n_used, slots_high=0, floors=True)
        )
        return
    model = convert("f16", "q4_0").absolute()
    engine = EngineConfig(n_ctx=EvaluationConfig.default_n_ctx, n_threads=1)
    with Evaluator(model, EvaluationConfig(engine)) as evaluator:
        chunks = evaluator.chunks((TINY / "heldout.txt").read_text(encoding="utf-8"))[: args.chunks]
        _, seen = profile(evaluator, chunks)
        info = evaluator.info
    if args.engine:
        print_engine(args, model, chunks, seen.experts.reshape(len(chunks), -1, *seen.experts.shape[1:]))
        return
    all_routes = routes(seen, slice(None)).reshape(seen.experts.shape)
    texts = [all_routes[seen.sequences == chunk] for chunk in np.unique(seen.sequences)]
    base = Simulation(info.n_layers, info.n_experts, info.n_experts_used, slots_high=0, floors=True)
    print_simulated(args, texts, base)


if __name__ == "__main__":
    main()
