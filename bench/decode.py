# SPDX-License-Identifier: MIT
"""Decodes random tokens one by one with a chosen build of llama.cpp and prints how fast, as one JSON line.

Run by bounded_memory.py, in a process of its own: two builds of libllama cannot live in one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import resource
import time
from typing import Any


def overrides(llama: Any, memory: int) -> ctypes.Array:
    array = (llama.llama_model_kv_override * 2)()  # an empty key ends it
    array[0].key, array[0].tag = b"hobbit.memory", llama.LLAMA_KV_OVERRIDE_TYPE_INT
    array[0].value.val_i64 = memory
    return array


def open_model(llama: Any, path: str, memory: int | None, threads: int, n_ctx: int) -> tuple[Any, Any]:
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    params.use_extra_bufts = False  # plain layouts in every arm
    keep_alive = overrides(llama, memory) if memory else None
    if keep_alive is not None:
        params.kv_overrides = keep_alive
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    context_params = llama.llama_context_default_params()
    context_params.n_ctx = n_ctx
    context_params.n_batch = context_params.n_ubatch = 128
    context_params.n_threads = context_params.n_threads_batch = threads
    context = llama.llama_init_from_model(model, context_params) if model else None
    if not context:
        raise SystemExit("the model could not be opened; see the log above")
    return model, context


def decode_all(llama: Any, model: Any, context: Any, n_tokens: int) -> list[float]:
    """Seconds of each token."""
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    draw = random.Random(1)
    seconds = []
    for _ in range(n_tokens):
        token = (llama.llama_token * 1)(draw.randrange(3, n_vocab))
        start = time.perf_counter()
        if llama.llama_decode(context, llama.llama_batch_get_one(token, 1)):
            raise SystemExit("llama_decode failed")
        llama.llama_synchronize(context)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lib-dir", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--memory", type=int, help="bytes; turns the expert cache on")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--warm-up", type=int, default=8, help="tokens that are not counted")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()

    os.environ["LLAMA_CPP_LIB_PATH"] = args.lib_dir
    import llama_cpp.llama_cpp as llama

    model, context = open_model(llama, args.model, args.memory, args.threads, args.tokens + args.warm_up)
    seconds = decode_all(llama, model, context, args.warm_up + args.tokens)[args.warm_up :]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"tokens_per_second": len(seconds) / sum(seconds), "peak_rss_bytes": peak}))
    llama.llama_free(context)
    llama.llama_model_free(model)


if __name__ == "__main__":
    main()
