# SPDX-License-Identifier: MIT
"""Allocations of C++ that fail below what Python calls: an error, and the right text afterwards.

    LD_PRELOAD=memory.so python tests/faults/throws.py MODEL [--tries N] [--seed N] [OPERATION ...]

memory.so is memory.cpp; MODEL has a chat template. In each try one allocation of an operation throws, or
some in a row. Prints a line for each operation: its allocations, tries, and errors. A crash ends the program;
standard error tells its try.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from llama_cpp import LlamaGrammar

from pyhobbit import Hobbit
from pyhobbit.engine.engine import Engine
from pyhobbit.errors import HobbitError
from pyhobbit.hobbit.guards import InputError
from pyhobbit.native.ffi import ffi, lib
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig

PROMPT = "def read_file(path):\n"
POOLS = 3_000_000
TURNS = [{"role": "user", "content": "def write_file("}]
memory = ctypes.CDLL(None)
memory.memory_fail.argtypes = [ctypes.c_long, ctypes.c_long]
memory.memory_calls.restype = ctypes.c_long

Operation = Callable[[], Any]


class Models:
    """The model as Hobbit, for embeddings and as Engine, opened anew after a failure that says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open()

    def open(self) -> None:
        options: dict[str, Any] = {"pools": POOLS, "n_ctx": 256, "verbose": False, "t1": 1.0}
        self.hobbit = Hobbit(self.path, **options)
        self.embedder = Hobbit(self.path, embedding=True, **options)
        self.engine = Engine(self.path, EngineConfig(CacheConfig(pools=POOLS, t1=1.0), n_ctx=256, n_beams=3))
        self.engine.open()

    def texts(self) -> tuple[str, str, Any]:
        """Greedy texts and a vector."""
        try:
            text = self.hobbit.create_completion(PROMPT, max_tokens=8, temperature=0.0)["choices"][0]["text"]
            pieces = self.engine.generate(PROMPT, 8, SamplingConfig(temp=0.0))
            return text, "".join(each.text for each in pieces), self.embedder.embed("other words")
        except HobbitError as e:
            if "open the model again" not in str(e):
                raise
        for each in (self.hobbit, self.embedder, self.engine):
            each.close()
        self.open()
        return self.texts()


def of_hobbit(models: Models) -> dict[str, Operation]:
    grammar = LlamaGrammar.from_string('root ::= "x" [a-z]+ "(" ")"', verbose=False)
    state, info = models.hobbit.save_state(), ffi.new("struct hobbit_info *")

    def answer(**arguments: Any) -> Any:
        models.hobbit.reset()
        return models.hobbit.create_completion(PROMPT, max_tokens=6, **arguments)

    def tokenize() -> bytes:
        return models.hobbit.detokenize(models.hobbit.tokenize(b"a text of some words, \xf0\x9f\x98\x80"))

    return {
        "Hobbit": lambda: Hobbit(models.path, pools=POOLS, n_ctx=256, verbose=False).close(),
        "completion": lambda: answer(temperature=0.0),
        "sampling": lambda: answer(temperature=0.8, repeat_penalty=1.1, frequency_penalty=0.1),
        "grammar": lambda: answer(grammar=grammar),
        "json": lambda: answer(grammar=LlamaGrammar.from_json_schema('{"type": "object"}', verbose=False)),
        "bias": lambda: answer(logit_bias={"5": 3.0}),
        "chat": lambda: models.hobbit.create_chat_completion(TURNS, max_tokens=6),
        "tokenize": tokenize,
        "save_state": lambda: models.hobbit.save_state(),
        "load_state": lambda: models.hobbit.load_state(state),
        "embed": lambda: models.embedder.embed("some words"),
        "get_info": lambda: lib.hobbit_get_info(models.hobbit._loaded.cache._pointer, info),  # cannot fail
        "stats": lambda: (models.hobbit.stats(), models.hobbit.info(), models.hobbit.metadata),
        "set": lambda: models.hobbit.set(t1=1.0),
    }


def of_engine(models: Models, folder: Path) -> dict[str, Operation]:
    def answer(prompt: Any) -> str:
        return "".join(piece.text for piece in models.engine.generate(prompt, 6, SamplingConfig(temp=0.0)))

    def opened() -> None:
        with Engine(models.path, EngineConfig(CacheConfig(pools=POOLS), n_ctx=256)) as other:
            other.n_prompt_tokens(TURNS)

    return {
        "Engine": opened,
        "generate": lambda: answer(PROMPT + "    "),
        "turns": lambda: answer(TURNS),
        "beams": lambda: models.engine.beam_search(PROMPT, 3, 4),
        "engine.save": lambda: models.engine.save_state(folder / "state"),
        "engine.load": lambda: models.engine.load_state(folder / "state"),
        "engine.info": lambda: (models.engine.info(), models.engine.latencies(), models.engine.stats()),
    }


def attempt(operation: Operation, first: int, count: int) -> tuple[int, str]:
    """Allocations, and the error; raises what is none of pyhobbit's or Python's for a lack of memory."""
    memory.memory_fail(first, count)
    try:
        operation()
        return memory.memory_calls(), ""
    except (HobbitError, MemoryError) as e:
        return memory.memory_calls(), str(e)
    finally:
        memory.memory_fail(-1, 0)


def check(name: str, operation: Operation, right: Callable[[], bool], tries: int, seed: int) -> None:
    random_ = random.Random(f"{seed} {name}")
    with suppress(InputError):
        operation()
    n, error = attempt(operation, sys.maxsize, 0)
    places = [*range(min(n, tries // 3)), *sorted(random_.sample(range(n), min(n, tries - tries // 3)))]
    n_errors = 0
    for place in places:
        count = random_.choice((1, 1, 3, 1000))
        print(f"{name}: {count} of {n} from {place}", file=sys.stderr, flush=True)
        error = attempt(operation, place, count)[1]
        n_errors += bool(error)
        if error:
            print(f"  {error}", file=sys.stderr)
        assert right(), f"{name}: other text after {count} allocations from {place} failed: {error}"
    print(f"{name:14} {n:8} {len(places):6} {n_errors:6}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("operations", nargs="*")
    parser.add_argument("--tries", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    models = Models(given.model)
    with tempfile.TemporaryDirectory() as folder:
        expected = models.texts()
        for name, operation in (of_hobbit(models) | of_engine(models, Path(folder))).items():
            if not given.operations or name in given.operations:
                check(name, operation, lambda: models.texts() == expected, given.tries, given.seed)


if __name__ == "__main__":
    main()
