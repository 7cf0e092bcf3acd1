# SPDX-License-Identifier: MIT
"""Hobbit: what it adds to llama_cpp.Llama, and that what it inherits computes the same."""

import functools
import inspect
import io
import os
import pickle
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from hobbits import GREEDY, POOLS, PROMPT, open_model, run_script, text_of
from llama_cpp import Llama
from traces import turn_lengths

from pyhobbit import (
    CacheConfig,
    ConfigError,
    Engine,
    EngineConfig,
    Hobbit,
    HobbitError,
    SamplingConfig,
)
from pyhobbit.errors import ContextError
from pyhobbit.native.ffi import llama
from pyhobbit.routing.trace import read_trace
from pyhobbit.settings.table import OPTIONS

THREADS = {"n_threads": 2, "n_threads_batch": 2}


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Iterator[Hobbit]:
    with open_model(tiny_gguf) as opened:
        yield opened


#
# Llama's behaviour
#


def test_nothing_is_printed_unless_it_is_asked_for(
    tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Hobbit(tiny_gguf, pools=POOLS, n_ctx=64) as model:
        model("a", max_tokens=1)
        assert str(model.stats()) == model.stats().summary()
    assert capfd.readouterr() == ("", "")
    with Hobbit(tiny_gguf, pools=POOLS, n_ctx=64, verbose=True):
        pass
    assert "llama_context" in capfd.readouterr().err


def test_ctrl_c_while_it_is_loaded_is_not_lost(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Llama.__init__

    class Stderr(io.StringIO):
        def write(self, text: str) -> int:
            if sys._getframe(1).f_code.co_name == "_on_text" and not self.tell():
                super().write(text)
                signal.raise_signal(signal.SIGINT)  # within llama.cpp's callback
            return len(text)

    @functools.wraps(begin)  # the keywords of `begin` are asked for
    def load(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(sys, "stderr", Stderr())
        begin(*arguments, **options)

    monkeypatch.setattr(Llama, "__init__", load)
    with pytest.raises(KeyboardInterrupt):
        open_model(tiny_gguf, verbose=True)


def test_logits_are_those_of_llama_without_a_cache() -> None:
    common = {"n_ctx": 256, "verbose": False, "logits_all": True, "flash_attn": False, **THREADS}
    plain = llama.Llama(str(models.tiny()), **common)
    tokens = plain.tokenize(PROMPT.encode() * 4)
    with Hobbit(models.tiny(), pools=POOLS // 2, **common) as ours:
        for each in (plain, ours):
            each.eval(tokens)
            for token in tokens[:20]:
                each.eval([token])
        assert ours.n_tokens == len(tokens) + 20
        assert ours.stats().cache.evictions > 0
        np.testing.assert_array_equal(ours._scores, plain._scores)
    plain.close()


def test_embeddings_are_those_of_llama() -> None:
    common = {
        "n_ctx": 256, "verbose": False, "embedding": True, "flash_attn": False,
        "pooling_type": llama.LLAMA_POOLING_TYPE_MEAN, **THREADS,
    }  # fmt: skip
    texts = ["import os", PROMPT, "class Node:"]
    plain = llama.Llama(str(models.tiny()), **common)
    with Hobbit(models.tiny(), pools=POOLS // 2, **common) as ours:
        assert ours.info().cached
        np.testing.assert_array_equal(ours.embed(texts, normalize=True), plain.embed(texts, normalize=True))
        answer = ours.create_embedding(texts[0])
        assert len(answer["data"][0]["embedding"]) == ours.n_embd()
        assert ours.stats().prompt_tokens_evaluated > answer["usage"]["prompt_tokens"]
    plain.close()


def test_a_stream_has_the_text_of_the_whole(model: Hobbit) -> None:
    chunks = list(model.create_completion(PROMPT, stream=True, **GREEDY))
    assert len(chunks) > 4
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(model)


def test_chat_streams_what_it_answers_at_once(tiny_gguf: Path) -> None:
    messages = [{"role": "user", "content": "write a function"}]
    with open_model(tiny_gguf, chat_format="chatml") as model:
        whole = model.create_chat_completion(messages, **GREEDY)["choices"][0]["message"]["content"]
        chunks = model.create_chat_completion(messages, stream=True, **GREEDY)
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole
    assert whole


def test_a_grammar_binds_the_text(model: Hobbit) -> None:
    grammar = llama.LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    assert text_of(model, grammar=grammar) in ("yes", "no")


def test_probabilities_of_tokens_come_with_logits_all(tiny_gguf: Path) -> None:
    with open_model(tiny_gguf, logits_all=True) as model:
        choice = model.create_completion(PROMPT, logprobs=2, **GREEDY)["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) > 0
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("n_ctx", [64, 100, 257, 700])
def test_an_answer_without_a_limit_ends_with_the_context(tiny_gguf: Path, n_ctx: int) -> None:
    with open_model(tiny_gguf, n_ctx=n_ctx) as model:
        assert model.n_ctx() == n_ctx
        bias = {"logit_bias": {model.token_eos(): -100.0}, "temperature": 0.0}
        answer = model.create_completion(PROMPT, max_tokens=-1, **bias)
        *_, last = model.create_completion(PROMPT, max_tokens=-1, stream=True, **bias)
        chat = model.create_chat_completion([{"role": "user", "content": PROMPT}], max_tokens=-1, **bias)
    assert answer["choices"][0]["finish_reason"] == last["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == chat["usage"]["total_tokens"] == n_ctx
    assert chat["choices"][0]["finish_reason"] == "length"


_SEEDS = [
    ({}, {}),
    ({"seed": -1}, {}),
    ({}, {"seed": -1}),
    ({"seed": 7}, {}),
    ({"seed": 0}, {}),
    ({}, {"seed": 7}),
]
_THREE = """
import sys
from pyhobbit import Hobbit
for own, of_answer in eval(sys.argv[2]):
    with Hobbit(sys.argv[1], pools=8 << 20, verbose=False, **own) as model:
        options = {"max_tokens": 12, "temperature": 1.5, **of_answer}
        print([model("def f(x):", **options)["choices"][0] for _ in range(3)])
"""


def test_texts_repeat_with_a_seed_alone(tiny_gguf: Path) -> None:
    first, second = (run_script(_THREE, tiny_gguf, _SEEDS).splitlines() for _ in range(2))
    assert [a == b for a, b in zip(first, second, strict=True)] == [False] * 3 + [True] * 3


def test_a_copy_of_a_model_without_a_seed_draws_its_own(tiny_gguf: Path) -> None:
    drawn = {"temperature": 1.5, "max_tokens": 24}
    with open_model(tiny_gguf) as model, pickle.loads(pickle.dumps(model)) as copy:
        assert text_of(copy, **drawn) != text_of(model, **drawn)


def test_strict_rules_repeat_a_text_that_low_precision_changes() -> None:
    path, seen = models.tiny_tiers("f16", "q4_0"), []
    for strict in (False, True):
        with open_model(path, t1=0.6, t2=0.95, pools=4 << 20, strict=strict) as model:
            texts = set()
            for _ in range(8):
                model.reset()
                texts.add(text_of(model, temperature=1.5, seed=1, max_tokens=64))
        seen.append(len(texts))
    assert seen[0] > seen[1] == 1


def test_two_answers_at_once_need_two_models_and_threads_may_take_turns(tiny_gguf: Path) -> None:
    prompts = [PROMPT, "import os\n"]
    with open_model(tiny_gguf) as first, open_model(tiny_gguf, pools=POOLS // 2) as second:
        alone = [text_of(first, prompt, max_tokens=64) for prompt in prompts]
        with ThreadPoolExecutor(2) as pool:
            together = pool.map(
                lambda job: text_of(*job, max_tokens=64), zip((first, second), prompts, strict=True)
            )
            assert list(together) == alone
            assert pool.submit(text_of, second, prompts[0], max_tokens=64).result() == alone[0]


#
# settings
#


def test_every_model_keeps_its_own_budget(tiny_gguf: Path) -> None:
    with (
        open_model(tiny_gguf, pools="4M") as small,
        open_model(tiny_gguf, pools=POOLS, t1=0.6, t2=0.9) as large,
    ):
        assert small.info().pool_bytes_high <= 4 << 20 < large.info().pool_bytes_high
        for model in (small, large, small):
            text_of(model)
        assert (small.info().t1, large.info().t1) == (1.0, 0.6)
        assert small.stats().cache.selections_low == 0 < large.stats().cache.selections_low
        assert small.stats().generated_tokens > large.stats().generated_tokens


def test_a_setting_by_name_comes_before_the_config(tiny_gguf: Path) -> None:
    with Hobbit(tiny_gguf, cache=CacheConfig(pools=POOLS, t1=0.5, t2=0.9), t1=0.7, verbose=False) as model:
        assert model.cache_config == CacheConfig(pools=POOLS, t1=0.7, t2=0.9)
        assert (model.info().t1, model.info().t2) == (0.7, 0.9)


def test_key_value_overrides_are_passed_on(tiny_gguf: Path) -> None:
    with open_model(tiny_gguf, kv_overrides={"hobbit.t1": 0.5, "hobbit.t2": 0.75}) as model:
        assert (model.info().t1, model.info().t2) == (0.5, 0.75)
        assert model.kv_overrides == {"hobbit.t1": 0.5, "hobbit.t2": 0.75}


def test_thresholds_change_while_it_is_open(tiny_gguf: Path) -> None:
    with open_model(tiny_gguf, t1=0.6, t2=1.0) as model:
        high = text_of(model)
        model.set(t1=0.0, t2=0.0)
        before = model.stats()
        low = text_of(model, "import os\n")
        assert model.stats().since(before).cache.selections_skipped > 0
        with pytest.raises(HobbitError, match="must not be above"):
            model.set(t1=0.9, t2=0.1)
    assert high != low


def test_a_copy_through_pickle_is_opened_with_the_same_settings(tiny_gguf: Path) -> None:
    with open_model(tiny_gguf, t1=0.6, t2=0.9, seed=7) as model:
        stored = pickle.dumps(model)
        with pickle.loads(stored) as copy:
            assert copy.cache_config == model.cache_config
            assert copy.info().pool_bytes_high == model.info().pool_bytes_high
            assert copy.n_ctx() == model.n_ctx()
            assert text_of(copy) == text_of(model)


def test_a_dense_model_runs_and_says_that_settings_do_nothing(tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    models.write_dense_llama(path)
    with Hobbit(path, verbose=False) as model:
        assert len(list(zip(range(3), model.generate([1, 70], temp=0.0), strict=False))) == 3
        assert not model.info().cached
        with pytest.raises(HobbitError, match="without an expert cache"):
            model.set(t1=0.5, t2=0.9)
    with pytest.warns(UserWarning, match="dense model"), Hobbit(path, memory="4G", verbose=False):
        pass


#
# errors
#

REFUSED: dict[str, tuple[dict[str, Any], type, str]] = {
    "unknown keyword": ({"memroy": 1}, TypeError, "did you mean memory"),
    "both bounds": ({"memory": "1G", "pools": "1G"}, HobbitError, "give one of them"),
    "size": ({"pools": "much"}, ConfigError, "not a size"),
    "size in GiB": ({"memory": 8}, ConfigError, "'8' is 8 bytes; for GiB write 8G"),
    "threshold": ({"t1": 2}, ConfigError, "between 0 and 1"),
    "thresholds": ({"t1": 0.9, "t2": 0.5}, ConfigError, "t1"),
    "cache of prompts": ({"cache": {}}, ConfigError, "set_cache"),
    "small pools": ({"pools": 1000}, HobbitError, "the smallest that work are"),
    "small memory": ({"pools": None, "memory": "1M"}, HobbitError, "the smallest that works is"),
    "policy": ({"policy": "best"}, HobbitError, "best"),
    "sidecar": ({"sidecar": "nowhere.gguf"}, HobbitError, "do not give it a sidecar"),
    "LoRA": ({"lora_path": "nowhere.gguf"}, HobbitError, "nowhere.gguf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(name: str, tiny_gguf: Path) -> None:
    arguments, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as error:
        open_model(tiny_gguf, **arguments)
    assert "\n" not in str(error.value)
    if kind is not TypeError:
        assert isinstance(error.value, ValueError)  # as llama_cpp.Llama's


def test_a_bad_file_is_refused_with_its_reason(tiny_gguf: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(tiny_gguf.read_bytes()[: -(1 << 20)])
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    for path, message in {
        torn: "is truncated",
        text: "is not a GGUF file",
        tmp_path / "none.gguf": "does not exist",
        tmp_path: "is a folder",
    }.items():
        with pytest.raises(HobbitError, match=message) as error:
            open_model(path)
        assert isinstance(error.value, ValueError)


def test_an_error_of_the_disk_while_generating_is_told_as_the_engine_tells_it(
    tiny_gguf: Path, tmp_path: Path, model: Hobbit
) -> None:
    path = tmp_path / "m.gguf"
    shutil.copyfile(tiny_gguf, path)
    whole = text_of(model)
    with open_model(path, pools=2 << 20, prefetch=0) as broken:
        stream = broken.create_completion(PROMPT, stream=True, **GREEDY)
        next(stream)
        os.truncate(path, path.stat().st_size // 8)
        with pytest.raises(HobbitError, match=r"m\.gguf") as error:
            list(stream)
        assert isinstance(error.value, RuntimeError)
        assert "llama_decode" not in str(error.value)
        with pytest.raises(HobbitError, match=r"none\.gguf does not exist"):
            open_model(tmp_path / "none.gguf")
        open_model(tiny_gguf).close()  # another model in between does not change the reason
        with pytest.raises(HobbitError, match=re.escape(str(error.value))):
            text_of(broken, "something else")
    assert text_of(model, "x") != whole
    assert text_of(model) == whole


def test_more_tokens_than_fit_are_refused_and_the_model_goes_on(model: Hobbit) -> None:
    whole = text_of(model)
    with pytest.raises(HobbitError, match="larger n_ctx"):
        list(model.generate([5] * 257))
    for stream in (False, True):
        with pytest.raises(
            ValueError, match=r"context of 256 .*; shorten it, or .* larger context, at most 512"
        ) as e:
            list(model("x " * 600, stream=stream))
        assert isinstance(e.value, ContextError)
    assert text_of(model) == whole


def test_a_state_of_another_context_is_refused_and_leaves_nothing_behind(
    tiny_gguf: Path, model: Hobbit
) -> None:
    whole = text_of(model)
    with open_model(tiny_gguf, type_k=8) as other, open_model(tiny_gguf, n_ctx=512) as larger:
        text_of(other)
        with pytest.raises(HobbitError, match="does not fit"):
            model.load_state(other.save_state())
        assert text_of(model) == whole
        text_of(larger)
        model.load_state(larger.save_state())
        assert model.n_ctx() == 256
        assert text_of(model) == whole
        larger.reset()
        larger.eval([5] * 400)
        with pytest.raises(HobbitError, match="does not fit"):
            model.load_state(larger.save_state())
        assert text_of(model) == whole


def test_a_second_thread_changes_nothing_of_an_answer(tiny_gguf: Path) -> None:
    """Also not where a recurrent state would be cleared under the first one."""
    with open_model(tiny_gguf) as model, ThreadPoolExecutor(1) as pool:
        whole = text_of(model)
        begun: list[object] = []
        model._loaded.cache.begin_sequence = lambda *sequence: begun.append(sequence)  # type: ignore[method-assign]

        def ask(_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
            model._n_kept = 1000
            begun.clear()
            for call in (model.reset, lambda: model.eval([5])):
                with pytest.raises(HobbitError, match="another thread"):
                    pool.submit(call).result()
            assert not begun
            model._n_kept = 0
            return scores

        assert text_of(model, logits_processor=[ask]) == whole


@pytest.mark.parametrize(("returned", "kind"), [(None, TypeError), ([1.0, 2.0], ValueError)])
def test_what_a_logits_processor_returns_is_checked(model: Hobbit, returned: object, kind: type) -> None:
    whole = text_of(model)
    with pytest.raises(kind):
        text_of(model, logits_processor=[lambda _ids, _scores: returned])
    assert text_of(model) == whole


#
# sequences and counters
#


def test_a_prompt_that_does_not_continue_the_last_begins_a_sequence(tiny_gguf: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    with open_model(tiny_gguf, trace=trace) as model:
        answer = text_of(model)
        text_of(model, PROMPT + answer + "\n    return x\n")  # continues: the same sequence
        text_of(model, "import os\n")
        model.reset()
        text_of(model, "import os\n")
        state = model.save_state()
        text_of(model, "class Node:\n")
        model.load_state(state)
        model.eval([5, 6])
    lengths = turn_lengths(read_trace(trace))
    assert len(lengths) == 5
    assert lengths[-1] == 2
    assert lengths[0] > lengths[1]


def test_counters_say_what_was_computed(tiny_gguf: Path) -> None:
    with open_model(tiny_gguf) as model:
        n_prompt = len(model.tokenize(PROMPT.encode()))
        n_generated = model(PROMPT, **GREEDY)["usage"]["completion_tokens"]
        stats = model.stats()
        assert (stats.prompt_tokens, stats.prompt_tokens_evaluated) == (n_prompt, n_prompt)
        assert (stats.answers, stats.generated_tokens) == (1, n_generated)
        assert stats.time_to_first_token_s is not None
        assert stats.decode_tokens_per_second is not None
        assert stats.cache.bytes_read > 0

        text_of(model)
        again = model.stats().since(stats)
        assert (again.prompt_tokens, again.prompt_tokens_evaluated) == (n_prompt, 1)
        assert again.generated_tokens == n_generated
        assert "32 generated" in model.stats().summary()


#
# calibrating
#


def test_hobbit_and_engine_count_alike(tiny_gguf: Path) -> None:
    """The second prompt shares its first tokens with the first one, whose answer is then forgotten."""
    prompts = ("def read_file(path):\n", "def read_file(name):\n")
    names = ("answers", "prompt_tokens", "prompt_tokens_evaluated", "generated_tokens", "decoded_tokens")
    config = EngineConfig(cache=CacheConfig(pools=POOLS), n_ctx=256, n_threads=2)
    with open_model(tiny_gguf, n_ctx=256, n_threads=2) as hobbit, Engine(tiny_gguf, config) as engine:
        for prompt in prompts:
            hobbit(prompt, max_tokens=6, temperature=0)
            assert len(list(engine.generate(prompt, 6, SamplingConfig(temp=0)))) == 6
        counted = [{name: getattr(of.stats(), name) for name in names} for of in (hobbit, engine)]
    assert counted[0] == counted[1]
    assert counted[0]["generated_tokens"] == 12
    assert counted[0]["prompt_tokens"] > counted[0]["prompt_tokens_evaluated"]


def test_every_setting_of_the_cache_is_a_keyword(tiny_gguf: Path) -> None:
    keywords = inspect.signature(Hobbit).parameters
    assert set(OPTIONS) <= set(keywords)
    assert all(f"{name}: " in (Hobbit.__doc__ or "") for name in OPTIONS)
    with open_model(tiny_gguf, device="CPU", io_threads=2) as model:
        assert model.cache_config == CacheConfig(pools=POOLS, device="CPU", io_threads=2)
    with pytest.raises(HobbitError, match="there is no device 'CUDA7'"):
        open_model(tiny_gguf, device="CUDA7", mode="gpu")
    with pytest.raises(ConfigError, match="mode is 'cpu'; choose one of gpu, cooperative, auto, twiddler"):
        open_model(tiny_gguf, mode="cpu")
