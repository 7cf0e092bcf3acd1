# SPDX-License-Identifier: MIT
"""Signals, NaN, grammars and odd arguments once changed a text without a word, or ended the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import random_moe
from llama_cpp import LlamaGrammar
from servers import serving

from pyhobbit import CacheConfig, Engine, EngineConfig, Hobbit
from pyhobbit.errors import HobbitError

POOLS = 5_000_000

INTERRUPTED = """
import random, signal, sys, time
from pyhobbit import Hobbit
def stop(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, stop)
model = Hobbit(sys.argv[1], pools="64M", n_ctx=512)
text = lambda n: model("def read_file(path):", max_tokens=n, temperature=0)["choices"][0]["text"]
expected, n_cut, n_wrong = text(12), 0, 0
random.seed(3)
takes = 10  # seconds; an answer that was not cut tells how long it took, whatever runs beside it
for _ in range(60):
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0003, takes))
    try:
        text(30)
        takes = min(takes, time.monotonic() - began)
    except KeyboardInterrupt:
        n_cut += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    n_wrong += text(12) != expected
print(n_cut > 20, n_wrong)
"""


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_an_answer_that_a_signal_broke_off_leaves_the_next_one_right(
    tiny_gguf: Path, tmp_path: Path, is_recurrent: bool
) -> None:
    model = tmp_path / "m.gguf" if is_recurrent else tiny_gguf
    if is_recurrent:
        random_moe.write_model(random_moe.hybrid(), model, models.STOCK_TOOLS)
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, model], capture_output=True, text=True, timeout=900
    )
    assert done.stdout.split() == ["True", "0"], done.stderr


def _with(value: float, tensor: str) -> Callable[[str, np.ndarray], list[tuple[str, np.ndarray]]]:
    def edit(name: str, data: np.ndarray) -> list[tuple[str, np.ndarray]]:
        return [(name, np.full_like(data, value) if name == tensor else data)]

    return edit


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        ("output_norm.weight", np.nan),
        ("blk.1.ffn_down_exps.weight", np.nan),
        ("blk.3.attn_norm.weight", np.inf),
    ],
)
def test_a_model_that_computes_nan_is_an_error(
    tiny_gguf: Path, tmp_path: Path, tensor: str, value: float
) -> None:
    path = models.copy_gguf(tiny_gguf, tmp_path / "nan.gguf", edit=_with(value, tensor))
    with Hobbit(str(path), pools=POOLS, n_ctx=128) as model:
        for given in ({}, {"temperature": 0.0}, {"grammar": LlamaGrammar.from_string('root ::= "a"')}):
            with pytest.raises(HobbitError, match="computes NaN"):
                model("x", max_tokens=4, **given)
    for drafts in (0, 7):
        config = EngineConfig(cache=CacheConfig(pools=POOLS), n_ctx=128, n_drafts=drafts)
        with Engine(path, config) as engine:
            with pytest.raises(HobbitError, match="computes NaN"):
                next(engine.generate("x"))
            with pytest.raises(HobbitError, match="computes NaN"):
                engine.beam_search("x", 1, 2)
    with serving(path, tmp_path / "log", "--pools", POOLS) as server:
        for name, value in (("temperature", 0), ("mirostat", 2), ("grammar", 'root ::= "a"'), ("n_probs", 3)):
            answer = server.request("/completion", {"prompt": "x", "n_predict": 4, name: value})
            assert (answer.status, "the model computes NaN" in answer.error) == (500, True)
        assert server.request("/health").status == 200


def test_a_grammar_that_no_token_fits_is_an_error(tiny_gguf: Path) -> None:
    """Once a dead process: an exception of C++ below Python."""
    with Hobbit(str(tiny_gguf), pools=POOLS, n_ctx=128) as model:
        none = dict.fromkeys(range(model.n_vocab()), float("-inf"))
        with pytest.raises(HobbitError, match="no token fits the grammar"):
            model("x", max_tokens=4, grammar=LlamaGrammar.from_string('root ::= "a"'), logit_bias=none)
        answer = model("x", max_tokens=8, grammar=LlamaGrammar.from_string('root ::= "yz"'))
        assert answer["choices"][0]["text"] == "yz"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (None, {}, "the prompt is None; give a text or a list of tokens"),
        (b"x", {}, "give a text or a list of tokens"),
        (["x"], {}, "give a text or a list of tokens"),
        ([5, 1.5], {}, "give a text or a list of tokens"),
        ("\ud800", {}, "cannot be tokenized"),
        ("x", {"temperature": float("nan")}, "temp is nan; it must be a finite number"),
        ("x", {"top_p": float("nan")}, "top_p is nan"),
        ("x", {"min_p": float("inf")}, "min_p is inf"),
        ("x", {"top_k": None}, "top_k is None"),
        ("x", {"grammar": 5}, "the grammar is 5"),
    ],
)
def test_arguments_that_cannot_be_are_an_error(
    tiny_gguf: Path, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with Hobbit(str(tiny_gguf), pools=POOLS, n_ctx=128) as model, pytest.raises(HobbitError, match=message):
        model(prompt, max_tokens=2, **options)


def test_a_text_that_is_cut_before_it_is_embedded_is_told(tiny_gguf: Path) -> None:
    with Hobbit(str(tiny_gguf), pools=POOLS, n_ctx=256, n_batch=32, embedding=True) as model:
        with pytest.warns(UserWarning, match=r"a text of \d+ tokens is cut to 32: .* larger n_batch"):
            model.embed("x = 1\n" * 30)
        text = 'model("import", max_tokens=4, temperature=0)'
        assert eval(text)["choices"] == eval(text)["choices"]  # the cache no longer holds the first prompt
