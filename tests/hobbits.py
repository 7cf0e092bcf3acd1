# SPDX-License-Identifier: MIT
"""Hobbits for tests, and programs that use them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pyhobbit import Hobbit

PROMPT = "def read_file(path):\n"
POOLS = 8 << 20
GREEDY = {"temperature": 0.0, "max_tokens": 16}

# llama_cpp itself leaves two files open
_STRICT = ("-W", "error", "-W", "ignore::ResourceWarning")


def open_model(path: Path, **arguments: Any) -> Hobbit:
    return Hobbit(path, **{"pools": POOLS, "verbose": False, "n_ctx": 256, **arguments})


def text_of(model: Hobbit, prompt: str = PROMPT, **arguments: Any) -> str:
    """The greedy continuation."""
    return model.create_completion(prompt, **{**GREEDY, **arguments})["choices"][0]["text"]


def run_script(body: str, *arguments: object, **environment: str) -> str:
    """Standard output of a program of its own, which must write nothing else and end well."""
    done = subprocess.run(
        [sys.executable, "-P", *_STRICT, "-c", body, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **environment},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout
