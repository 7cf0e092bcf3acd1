# SPDX-License-Identifier: MIT
"""pyhobbit with a model that says what it is told: python scripted.py ANSWERS ARGUMENTS...

ANSWERS is a JSON list of texts, one for each question. They take the place of what the sampler draws, so
all else runs as always: the template, the parser of the answers and the screen.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pyhobbit.cli.main import main
from pyhobbit.engine import engine
from pyhobbit.native.ffi import llama


def sampler_class(answers: Sequence[str]) -> type:
    """Stands for pyhobbit.engine.engine.Sampler: each sampler draws one of the answers and then its end."""
    left = iter(answers)

    class Scripted:
        def __init__(self, _config: object, _model: object, _grammar: str) -> None:
            self._answer = next(left)
            self._tokens: Iterator[int] | None = None

        def sample(self, context: Any) -> int:
            model = context.model
            if self._tokens is None:
                self._tokens = iter(model.tokenize(self._answer, begins_text=False))
            return next(self._tokens, llama.llama_vocab_eos(model.vocab))

        def close(self) -> None:
            pass

    return Scripted


if __name__ == "__main__":
    engine.Sampler = sampler_class(json.loads(sys.argv[1]))  # type: ignore[misc]
    sys.exit(main(sys.argv[2:]))
