# SPDX-License-Identifier: MIT
"""Computes a model of tests/engine/architectures.py under several pool settings, all in this process.

The unpatched library makes the model's file first. Ours finds the smallest pools that it accepts, and runs
with them, with half of the experts, and with half and prefetch. Contexts are as chat has them: attention as
llama.cpp chooses it, a prompt in micro-batches of which only the last token has logits.

    python tests/engine/architecture_run.py --lib-dir build/stock/bin --folder DIR llama qwen3moe
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import logits
import numpy as np
from architecture_models import N_CTX, N_EMBD, N_VOCAB, write_model
from architectures import ARCHITECTURES

from pyhobbit.settings.config import kv_overrides

N_UBATCH = 64
N_PROMPT = 100
N_STEPS = 6
N_DECODE = 12


class Model:
    """A loaded model; `batches` are decoded in a context of their own."""

    def __init__(self, llama: Any, path: Path, overrides: dict[str, logits.Override]) -> None:
        self.llama = llama
        params = llama.llama_model_default_params()
        params.use_extra_bufts = False
        self._overrides = kv_overrides(llama, overrides)
        params.kv_overrides = self._overrides
        self.model = llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise logits.RunError(f"{path.name} could not be loaded")
        self.architecture = ARCHITECTURES[path.stem]

    def context(self) -> Any:
        llama = self.llama
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = N_CTX, N_CTX, N_UBATCH, 2
        params.n_threads = params.n_threads_batch = logits.N_THREADS
        params.kv_unified = True
        if self.architecture.at_once:
            params.n_ubatch = N_CTX
        if self.architecture.embeds:
            params.embeddings = True
            params.pooling_type = llama.LLAMA_POOLING_TYPE_NONE
        context = llama.llama_init_from_model(self.model, params)
        if not context:
            raise logits.RunError("the context could not be created")
        return context

    def decode(self, batches: list[logits.Batch], all_rows: bool) -> np.ndarray:
        """float32 [rows, vocabulary] of each batch, of its last token alone unless all_rows are asked for."""
        context = self.context()
        all_rows |= self.architecture.embeds
        try:
            return np.concatenate([self._decode(context, batch, all_rows) for batch in batches])
        finally:
            self.llama.llama_free(context)

    def _decode(self, context: Any, tokens: logits.Batch, all_rows: bool) -> np.ndarray:
        llama = self.llama
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.logits[i] = all_rows or i == len(tokens) - 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = llama.llama_decode(context, batch)
        llama.llama_batch_free(batch)
        if status:
            raise logits.RunError(f"llama_decode failed with status {status}")
        embeds = self.architecture.embeds
        values = (llama.llama_get_embeddings if embeds else llama.llama_get_logits)(context)
        width = N_EMBD if embeds else N_VOCAB
        return np.ctypeslib.as_array(values, shape=(len(tokens) if all_rows else 1, width)).copy()

    def close(self) -> None:
        self.llama.llama_model_free(self.model)


def plans() -> dict[str, tuple[list[logits.Batch], bool]]:
    """Batches by name, and whether all of their rows are wanted."""
    tokens = np.random.default_rng(11).integers(3, N_VOCAB, N_PROMPT + 2 * N_STEPS).tolist()
    prompt = [[(token, i, 0) for i, token in enumerate(tokens[:N_PROMPT])]]
    prompt += [[(tokens[N_PROMPT + n], N_PROMPT + n, 0)] for n in range(N_STEPS)]
    sequences = [[(tokens[20 * s + i], i, s) for s in range(2) for i in range(5)]]
    sequences += [[(tokens[40 + 20 * s + n], 5 + n, s) for s in range(2)] for n in range(N_STEPS)]
    decode = [[(token, i, 0)] for i, token in enumerate(tokens[:N_DECODE])]
    return {"decode": (decode, True), "prompt": (prompt, False), "sequences": (sequences, True)}


def n_tokens_of(batches: list[logits.Batch]) -> int:
    return sum(len(batch) for batch in batches)


def _computed(llama: Any, lib_dir: Path, path: Path, overrides: dict[str, logits.Override]) -> Iterator[Any]:
    """Pairs of an array's name and itself."""
    model = Model(llama, path, overrides)
    for name, (batches, all_rows) in plans().items():
        yield f"logits/{name}", model.decode(batches, all_rows)
    if overrides:
        yield from logits.hobbit_structs(lib_dir, model)
    model.close()


def _smallest(llama: Any, path: Path, log: list[str]) -> int:
    """The smallest pools that our library accepts, from its own message."""
    log.clear()
    try:
        Model(llama, path, {"hobbit.enable": True, "hobbit.pools": 1}).context()
    except logits.RunError as error:
        found = re.search(r"smallest that works? (?:is|are) (\d+) bytes", "".join(log))
        if found:
            return int(found[1])
        raise logits.RunError("".join(log)[-2000:]) from error
    raise logits.RunError("pools of one byte were accepted")


def _settings(smallest: int, everything: int) -> dict[str, dict[str, logits.Override]]:
    half = max(smallest, everything // 2)
    shared: dict[str, logits.Override] = {"hobbit.enable": True, "hobbit.prefetch": 0}
    return {
        "smallest": shared | {"hobbit.pools": smallest},
        "half": shared | {"hobbit.pools": half},
        "prefetch": shared | {"hobbit.pools": half, "hobbit.prefetch": 2},
    }


def _run(llama: Any, lib_dir: Path, path: Path, everything: int, log: list[str]) -> dict[str, Any]:
    if not everything:
        return dict(_computed(llama, lib_dir, path, {}))
    arrays: dict[str, Any] = {}
    for setting, overrides in _settings(_smallest(llama, path, log), everything).items():
        for name, value in _computed(llama, lib_dir, path, overrides):
            arrays[f"{setting}/{name}"] = value
    return arrays


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compute small models of the named architectures.")
    parser.add_argument("--lib-dir", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the models and of the results")
    parser.add_argument("--experts", type=json.loads, default={}, help="bytes of routed experts by name")
    parser.add_argument("names", nargs="+", choices=ARCHITECTURES, metavar="NAME")
    args = parser.parse_args(argv)
    os.environ["LLAMA_CPP_LIB_PATH"] = str(args.lib_dir)
    import llama_cpp.llama_cpp as llama

    log: list[str] = []
    callback = llama.llama_log_callback(lambda _level, text, _data: log.append(text.decode(errors="replace")))
    llama.llama_log_set(callback, None)
    llama.llama_backend_init()
    for name in args.names:
        path = args.folder / f"{name}.gguf"
        print(f"{name}: ", end="", file=sys.stderr, flush=True)
        try:
            if not args.experts:
                write_model(llama, args.lib_dir, name, ARCHITECTURES[name], path)
            arrays = _run(llama, args.lib_dir, path, args.experts.get(name, 0), log)
        except (logits.RunError, ValueError) as error:
            print(f"{error}: {''.join(log)[-2000:]}", file=sys.stderr)
            return 1
        out = args.folder / f"{name}-{'ours' if args.experts else 'stock'}.npz"
        np.savez(out, **arrays)
        log.clear()
        print("computed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
