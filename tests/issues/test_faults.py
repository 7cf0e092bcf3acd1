# SPDX-License-Identifier: MIT
"""Faults that once ended the process, broke a bound or gave another text: each is now a sentence."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import models
import pytest
from conftest import RunPyhobbit
from gguf import GGMLQuantizationType
from llama_cpp import LlamaGrammar
from servers import serving

from pyhobbit import CacheConfig, Engine, EngineConfig, Hobbit
from pyhobbit.errors import ContextError, HobbitError
from pyhobbit.native.files import temporary_file

POOLS = 5_000_000
TOKEN_TWICE = int.from_bytes(b"x01>", "little")
"""In the place of the end of <0x00>, which comes before <0x01>."""


def changed(model: Path, folder: Path, key: str, value: bytes, n_skipped: int = 4) -> Path:
    """A copy whose header has other bytes behind the key's type."""
    copy = folder / "damaged.gguf"
    shutil.copyfile(model, copy)
    data = bytearray(copy.read_bytes())
    at = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + n_skipped
    data[at : at + len(value)] = value
    copy.write_bytes(data)
    return copy


#
# prompts
#


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * (4 << 20)
    with Engine(tiny_gguf, EngineConfig(cache=CacheConfig(pools=POOLS), n_ctx=128)) as engine:
        monkeypatch.setattr(type(engine._opened().model), "tokenize", pytest.fail)
        with pytest.raises(ContextError, match=r"bytes, more than the context of 128 tokens can hold"):
            next(engine.generate(long))
    with Hobbit(str(tiny_gguf), pools=POOLS, n_ctx=256, verbose=False) as model:
        monkeypatch.setattr(Hobbit, "tokenize", pytest.fail)
        with pytest.raises(ContextError, match="bytes, more than the context of 256 tokens can hold"):
            model(long)


def test_a_prompt_that_may_fit_is_counted(tiny_gguf: Path) -> None:
    with (
        Engine(tiny_gguf, EngineConfig(cache=CacheConfig(pools=POOLS), n_ctx=128)) as engine,
        pytest.raises(ContextError, match=r"the prompt has \d+ tokens"),
    ):
        next(engine.generate("x = 1\n" * 128))


def test_a_server_keeps_its_memory_under_long_prompts(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--pools", "6M", "--ctx-size", 512) as server:
        server.complete()
        before = server.peak()
        text = "x" * (1 << 20)
        for path, body in (
            ("/completion", {"prompt": text}),
            ("/v1/completions", {"prompt": [text, "x"]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            answer = server.request(path, body)
            assert answer.status == 413
            assert "are planned for that; shorten it" in answer.error
        assert server.peak() - before < 64 << 20
        assert server.complete()


#
# headers
#


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.expert_used_count", struct.pack("<I", 0)),
        ("llama.expert_used_count", struct.pack("<I", 9)),
        ("llama.expert_count", struct.pack("<I", 0)),
        ("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", float("nan"))),
    ],
)
def test_counts_out_of_range_are_an_error(
    tiny_gguf: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit, key: str, value: bytes
) -> None:
    model = changed(tiny_gguf, tmp_path, key, value)
    for verb in (("chat", model, "-p", "x", "-n", 1), ("inspect", model, "--no-speed")):
        done = run_pyhobbit(*verb)
        assert done.returncode == 1, done.stderr
        assert "is damaged: its header has" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arch", "key", "n_skipped", "value", "reason"),
    [
        ("qwen3moe", "qwen3moe.rope.dimension_count", 4, 8, r"GGML_ASSERT\(n_embd_head == n_rot\) failed"),
        ("phimoe", "phimoe.rope.dimension_count", 4, 9, "the CPU cannot compute ROPE"),
        ("phimoe", "phimoe.rope.dimension_count", 4, 128, "the CPU cannot compute ROPE"),
        ("phimoe", "blk.1.attn_norm.weight", 12, GGMLQuantizationType.I32, "the CPU cannot compute MUL"),
        ("phimoe", "blk.1.attn_norm.bias", 12, GGMLQuantizationType.I32, "the CPU cannot compute ADD"),
        ("phimoe", "tokenizer.ggml.tokens", 62, TOKEN_TWICE, r"id_to_token.size\(\) == token_to_id.size\(\)"),
    ],
)
def test_a_check_of_llamas_own_that_fails_is_an_error_of_its_model(
    tmp_path: Path, arch: str, key: str, n_skipped: int, value: int, reason: str
) -> None:
    good = models.random_model(arch, "q8_0")
    damaged = changed(good, tmp_path, key, struct.pack("<I", value), n_skipped)
    for model in (damaged, good, damaged):
        expected = contextlib.nullcontext() if model == good else pytest.raises(HobbitError, match=reason)
        with expected, Hobbit(str(model), pools=POOLS, n_ctx=64, verbose=False) as opened:
            opened.eval([1, 5])


def test_a_lost_key_of_the_tiers_is_an_error(tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    """The low tier would be ignored without a word."""
    copy = tmp_path / "lost.gguf"
    copy.write_bytes(models.tiny_tiers("q8_0", "q4_0").read_bytes().replace(b"hobbit.tiers", b"hobbit.tierz"))
    done = run_pyhobbit("chat", copy, "-p", "x", "-n", 1, "--pools", "5M")
    assert done.returncode == 1
    assert "has tiers but does not declare them in hobbit.tiers" in done.stderr


def test_texts_that_are_not_utf_8_are_shown(
    tiny_gguf: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    model = changed(tiny_gguf, tmp_path, "general.name", b"\xe9", n_skipped=12)
    done = run_pyhobbit("inspect", model, "--no-speed")
    assert done.returncode == 0, done.stderr
    assert "�" in done.stdout


def test_tiers_of_another_kind_are_an_error(
    tiny_gguf: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    model = tmp_path / "m.gguf"
    high = struct.pack("<Q", 4) + b"high" + struct.pack("<Q", 3) + b"low"
    data = tiny_gguf.read_bytes()
    model.write_bytes(data.replace(high, struct.pack("<Q", 4) + b"hagh" + struct.pack("<Q", 3) + b"low"))
    for verb in (("config", "--model", model), ("inspect", model, "--no-speed")):
        done = run_pyhobbit(*verb)
        assert done.returncode in (1, 2)
        assert "Traceback" not in done.stderr


#
# files and processes
#


def test_a_fifo_is_no_model(tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    done = run_pyhobbit("chat", tmp_path / "m.gguf", "-p", "x")
    assert done.returncode == 1
    assert "is not a regular file" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("chat", "MODEL", "-p", "x", "--pools", "5M", "--sidecar", os.fsdecode(b"no\xff.gguf")),
        ("chat", "MODEL", "-p", "x", "--pools", "5M", "--trace", os.fsdecode(b"/no/\xff.csv")),
        ("convert", "--low", "q4_0", "/"),
        ("chat", "", "-p", "x"),
        ("inspect", "", "--no-speed"),
    ],
)
def test_odd_paths_are_a_sentence(
    tiny_gguf: Path, run_pyhobbit: RunPyhobbit, arguments: tuple[str, ...]
) -> None:
    done = run_pyhobbit(*(str(tiny_gguf) if word == "MODEL" else word for word in arguments))
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("pyhobbit: ")
    assert "Traceback" not in done.stderr


def test_a_killed_conversions_file_is_removed_by_the_next(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, other, foreign = (
        tmp_path / name
        for name in (".m.gguf.01234567.tmp", ".n.gguf.01234567.tmp", f".m.gguf.{gone.pid}.tmp")
    )
    for path in (left, other, foreign):
        path.touch()
    with temporary_file(tmp_path / "m.gguf") as running, temporary_file(tmp_path / "m.gguf") as second:
        assert running != second
        assert running.exists()
    assert not left.exists()
    assert other.exists()
    assert foreign.exists()  # nothing of ours is named so
    assert not running.exists()


FORK = """
import os, sys
from pyhobbit import HobbitError
from pyhobbit import Hobbit
model = Hobbit(sys.argv[1], pools=5_000_000, verbose=False)
model("import", max_tokens=2)
if sys.argv[2] == "stream":
    stream = model("import", max_tokens=9, stream=True)
    next(stream)
child = os.fork()
if child == 0:
    if sys.argv[2] == "close":
        model.close()
    elif sys.argv[2] != "exit":
        try:
            list(stream) if sys.argv[2] == "stream" else eval(sys.argv[2])
        except HobbitError as e:
            sys.exit(7 if "was opened before fork(); open it in this process" in str(e) else 8)
    sys.exit(7)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
print(len(model("import", max_tokens=2)["choices"]))
"""


@pytest.mark.parametrize("action", ["exit", "close", "stream", "model('x', max_tokens=2)", "model.eval([1])"])
def test_a_forked_child_ends(tiny_gguf: Path, action: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, tiny_gguf, action], capture_output=True, text=True, timeout=900
    )
    assert done.stdout.split() == ["7", "1"], done.stderr


def test_a_second_thread_gets_a_sentence(tiny_gguf: Path) -> None:
    """Once a dead process: two threads in one context."""
    inside, go_on = threading.Event(), threading.Event()
    with Hobbit(str(tiny_gguf), pools=POOLS, n_ctx=512, verbose=False) as model:
        decode = model._ctx.decode

        def wait_inside(batch: Any) -> None:
            inside.set()
            assert go_on.wait(300)
            decode(batch)

        model._ctx.decode = wait_inside
        thread = threading.Thread(target=lambda: model("def read_file(path):", max_tokens=4))
        state = model.save_state()
        thread.start()
        assert inside.wait(300)
        attempts = (
            *(lambda: model("x", max_tokens=1), lambda: model.load_state(state), lambda: model.embed("x")),
            *(model.save_state, model.sample, model.close),
        )
        for attempt in attempts:
            with pytest.raises(HobbitError, match="another thread computes with this model"):
                attempt()
        go_on.set()
        thread.join()
        assert model("x", max_tokens=1)["choices"]


def test_a_sample_of_nothing_is_refused(tiny_gguf: Path) -> None:
    """llama.cpp ends the process where it has no probabilities."""
    with Hobbit(str(tiny_gguf), pools=POOLS, n_ctx=128, embedding=True, verbose=False) as model:
        with pytest.raises(HobbitError, match="there is nothing to sample from"):
            model.sample()
        model.eval([1, 2])
        assert 0 <= model.sample() < model.n_vocab()
        model.embed("x")
        with pytest.raises(HobbitError, match="there is nothing to sample from"):
            model.sample()


def test_an_answer_that_is_overtaken_ends_with_a_sentence(tiny_gguf: Path) -> None:
    with Hobbit(str(tiny_gguf), pools=POOLS, n_ctx=512, verbose=False) as model:
        stream = model("def read_file(path):", max_tokens=40, stream=True, temperature=0.0)
        next(stream)
        expected = model("import", max_tokens=8, temperature=0.0)["choices"]
        with pytest.raises(HobbitError, match="another answer was begun"):
            list(stream)
        assert model("import", max_tokens=8, temperature=0.0)["choices"] == expected


@pytest.mark.parametrize("token", [-1, 10**6])
def test_unknown_tokens_are_refused(tiny_gguf: Path, token: int) -> None:
    with Hobbit(str(tiny_gguf), pools=POOLS, n_ctx=128, verbose=False) as model:
        for call in (model.detokenize, model.eval, lambda tokens: list(model.generate(tokens))):
            with pytest.raises(HobbitError, match="this model's lie between 0 and"):
                call([1, token])
        assert model("x", max_tokens=1)["choices"]


@pytest.mark.parametrize("text", ["root ::= (", 'start ::= "x"', "root ::= root"])
def test_a_grammar_that_cannot_be_read_is_an_error(tiny_gguf: Path, text: str) -> None:
    with Hobbit(str(tiny_gguf), pools=POOLS, n_ctx=128, verbose=False) as model:
        with pytest.raises(HobbitError, match="the grammar cannot be read"):
            model("x", max_tokens=4, grammar=LlamaGrammar.from_string(text))
        answer = model("x", max_tokens=4, grammar=LlamaGrammar.from_string('root ::= "yz"'))
        assert answer["choices"][0]["text"] == "yz"


def test_an_exception_in_a_logits_processor_ends_the_answer(tiny_gguf: Path) -> None:
    def fail(_ids: Any, _scores: Any) -> Any:
        raise KeyError("of the user")

    with Hobbit(str(tiny_gguf), pools=POOLS, n_ctx=128, verbose=False) as model:
        with pytest.raises(KeyError, match="of the user"):
            model("x", max_tokens=4, logits_processor=[fail])
        given = model("x", max_tokens=4, temperature=0.0, logits_processor=[lambda _ids, scores: scores])
        assert given["choices"] == model("x", max_tokens=4, temperature=0.0)["choices"]
