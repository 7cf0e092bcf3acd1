# SPDX-License-Identifier: MIT
import io
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import models
import pytest

from pyhobbit import CacheConfig, ConfigError, Engine, EngineConfig, HobbitError, SamplingConfig
from pyhobbit.chat.answer import interrupting
from pyhobbit.engine import llama as binding
from pyhobbit.engine.engine import Piece
from pyhobbit.errors import ContextError
from pyhobbit.native.ffi import llama
from pyhobbit.settings.table import OPTIONS

pytestmark = pytest.mark.model

PROMPT = "def read_file(path):\n"


@pytest.fixture(scope="module")
def engine(tiny_gguf: Path) -> Iterator[Engine]:
    with Engine(tiny_gguf, EngineConfig(cache=CacheConfig(pools=8 << 20), n_threads=2)) as opened:
        yield opened


def _text(pieces: Iterator[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _greedy(engine: Engine, prompt: str, n: int) -> str:
    return _text(engine.generate(prompt, n, SamplingConfig(temp=0)))


def test_the_same_seed_gives_the_same_text(engine: Engine) -> None:
    def sampled(seed: int) -> str:
        return _text(engine.generate(PROMPT, 24, SamplingConfig(temp=1.5, seed=seed)))

    sampled(
        1
    )  # from now on the prompt is in the KV cache but for its last token, which another kernel computes
    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(1, 5)}) > 1
    assert len({sampled(-1) for _ in range(4)}) > 1


def test_pieces_carry_rising_times_and_the_last_one_why_it_ended(engine: Engine) -> None:
    pieces = list(engine.generate(PROMPT, 5, SamplingConfig(temp=0)))
    assert len(pieces) == 5
    assert [piece.finish for piece in pieces] == [None] * 4 + ["length"]
    times = [piece.time_s for piece in pieces]
    assert times == sorted(times)
    assert times[0] > 0


def test_a_known_beginning_is_not_evaluated_again(engine: Engine) -> None:
    answer = _greedy(engine, PROMPT, 6)
    before = engine.stats()
    assert _greedy(engine, PROMPT, 6) == answer
    after = engine.stats()
    assert after.prompt_tokens > before.prompt_tokens
    assert after.prompt_tokens_evaluated == before.prompt_tokens_evaluated + 1


def test_the_figures_of_each_answer_are_differences(engine: Engine) -> None:
    start = engine.stats()
    _greedy(engine, PROMPT, 6)
    between = engine.stats()
    _greedy(engine, "import os", 4)
    end = engine.stats()
    first, second = between.since(start), end.since(between)
    assert (first.answers, first.generated_tokens, first.decoded_tokens) == (1, 6, 5)
    assert (second.answers, second.generated_tokens, second.decoded_tokens) == (1, 4, 3)
    assert second.time_to_first_token_s > 0
    assert second.decode_tokens_per_second == pytest.approx(3 / second.decode_s)
    # The last layer computes only the last token of a prompt.
    n_routed = end.info.n_layers * (second.prompt_tokens_evaluated + 3) - (second.prompt_tokens_evaluated - 1)
    assert second.cache.selections == n_routed * end.info.n_experts_used
    assert end.since(start).generated_tokens == 10


def test_thresholds_change_between_two_answers(tiny_gguf: Path) -> None:
    config = EngineConfig(cache=CacheConfig(pools=8 << 20, t1=0.5, t2=0.9), n_threads=2)
    with Engine(tiny_gguf, config) as opened:
        opened.set(t1=1, t2=1)
        assert (opened.info().t1, opened.info().t2) == (1, 1)
        high = opened.stats()
        _greedy(opened, PROMPT, 8)
        high = opened.stats().since(high)
        opened.set(t1=0, t2=0)
        skipping = opened.stats()
        _greedy(opened, "import os", 8)
        skipping = opened.stats().since(skipping)
        assert high.cache.selections_low == high.cache.selections_skipped == 0 < high.cache.selections_high
        assert skipping.cache.selections_skipped > 0 == skipping.cache.selections_low
        for t1, t2 in ((0.9, 0.5), (-1, 1), (0, float("nan"))):
            with pytest.raises(ConfigError):
                opened.set(t1=t1, t2=t2)
        assert (opened.info().t1, opened.info().t2) == (0, 0)


def test_settings_that_contradict_each_other_open_no_model(tiny_gguf: Path) -> None:
    engine = Engine(tiny_gguf, EngineConfig(cache=CacheConfig(pools=8 << 20, t1=0.9, t2=0.5)))
    with pytest.raises(ConfigError, match=r"t1 \(0.9\) must not be above"):
        engine.open()


def test_a_live_setting_changes_alone_and_others_not_at_all(tiny_gguf: Path) -> None:
    config = EngineConfig(cache=CacheConfig(pools=8 << 20, t1=0.5, t2=0.9), n_ctx=64)
    with Engine(tiny_gguf, config) as opened:
        opened.set(t2=0.75)
        assert (opened.info().t1, opened.info().t2) == (0.5, 0.75)
        with pytest.raises(ConfigError, match="policy cannot change while a model is open"):
            opened.set(policy="lru")  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            opened.set(t1=2)
        assert (opened.info().t1, opened.info().t2) == (0.5, 0.75)


def test_every_predictor_gives_the_same_text(tiny_gguf: Path) -> None:
    texts = {}
    for name in OPTIONS["predictor"][0].choices:
        cache = CacheConfig(pools=10 << 20, t1=1.0, predictor=name)
        with Engine(tiny_gguf, EngineConfig(cache=cache, n_threads=1)) as engine:
            pieces = engine.generate("def f(x):\n", 32, SamplingConfig(temp=0))
            texts[name] = "".join(piece.text for piece in pieces)
            assert engine.stats().cache.predicted > 0, name
    assert {"router", "paths"} <= set(texts)
    assert len(set(texts.values())) == 1


def test_thresholds_need_a_low_pool_and_a_cache(tiny_gguf: Path, tmp_path: Path) -> None:
    with Engine(tiny_gguf, EngineConfig(cache=CacheConfig(pools=8 << 20, t1=1, t2=1))) as high:
        needed = "no memory was set aside for the low tier: restart with "
        with pytest.raises(HobbitError, match=f"^{needed}--set t1=0.5 --set t2=0.9$"):
            high.set(t1=0.5, t2=0.9)
        with pytest.raises(HobbitError, match=f"^{needed}--quality fast$"):
            high.set(quality="fast")
        with pytest.raises(HobbitError, match="runs by t1 and t2: restart with --set rule=price"):
            high.set(price=0.5)
        assert high.info().t1 == 1
    models.write_dense_llama(tmp_path / "dense.gguf")
    with (
        Engine(tmp_path / "dense.gguf") as dense,
        pytest.raises(HobbitError, match="without an expert cache"),
    ):
        dense.set(t1=0.5, t2=0.9)


def test_a_penalty_makes_repetition_rarer(engine: Engine) -> None:
    def n_different(penalty: float) -> int:
        sampling = SamplingConfig(temp=0, repeat_penalty=penalty)
        return len({piece.token for piece in engine.generate("# # # #", 60, sampling)})

    assert n_different(1.0) < 30 < n_different(1.8)


def test_an_answer_ends_with_the_context(tiny_gguf: Path) -> None:
    config = EngineConfig(cache=CacheConfig(pools=8 << 20), n_ctx=32)
    with Engine(tiny_gguf, config) as small:
        pieces = list(small.generate(PROMPT, None, SamplingConfig(temp=0)))
        assert pieces[-1].finish == "context"
        assert small.stats().prompt_tokens + len(pieces) == 33  # the last token needs no place
        with pytest.raises(
            ContextError,
            match=r"more than the context of 32 .*; shorten it, or .* larger context, at most 512",
        ):
            list(small.generate("x " * 100, 1))
        # An answer still works after one that failed.
        assert len(list(small.generate("a b", 1))) == 1


def test_interrupt_ends_an_answer_and_the_next_one_is_whole(engine: Engine) -> None:
    whole = _greedy(engine, PROMPT, 8)
    pieces = []
    for piece in engine.generate(PROMPT, 8, SamplingConfig(temp=0)):
        pieces.append(piece)
        if len(pieces) == 3:
            engine.interrupt()
    assert pieces[-1].finish == "interrupted"
    assert len(pieces) == 4
    assert whole.startswith(_text(iter(pieces)))
    assert _greedy(engine, PROMPT, 8) == whole


def test_an_interrupted_prompt_leaves_no_half_of_it(engine: Engine) -> None:
    whole = _greedy(engine, PROMPT * 10, 4)
    engine.interrupt()
    pieces = list(engine.generate("other " * 200, 8))
    assert [piece.finish for piece in pieces] == ["interrupted"]
    assert _greedy(engine, PROMPT * 10, 4) == whole


class _Interrupting(io.StringIO):
    """Gets Ctrl-C with the first line of llama.cpp's log."""

    def write(self, text: str) -> int:
        if not self.tell():
            super().write(text)
            signal.raise_signal(signal.SIGINT)
        return len(text)


def test_ctrl_c_within_a_callback_of_llama_cpp_is_not_lost(
    engine: Engine, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", _Interrupting())
        with pytest.raises(KeyboardInterrupt):
            Engine(tiny_gguf, EngineConfig(verbose=True)).__enter__()
    with pytest.raises(KeyboardInterrupt):
        Engine(tiny_gguf, on_loading=lambda _share: signal.raise_signal(signal.SIGINT)).__enter__()

    context, whole = engine._opened().context, _greedy(engine, PROMPT, 8)
    context._aborted, aborted = lambda: signal.raise_signal(signal.SIGINT) or False, context._aborted
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate("other " * 200, 8))
    context._aborted = aborted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert _greedy(engine, PROMPT, 8) == whole


def test_half_characters_wait_for_their_other_half(engine: Engine) -> None:
    model = engine._opened().model
    text = "# größer als 10 €: 🙂\n"
    tokens = model.tokenize(text)
    assert b"".join(model.piece(token) for token in tokens).decode().strip() == text.strip()


def test_a_closed_engine_says_so(tiny_gguf: Path) -> None:
    engine = Engine(tiny_gguf)
    with pytest.raises(HobbitError, match="not open"):
        engine.info()
    with engine:
        assert engine.info().n_ctx > 0
    engine.close()
    with pytest.raises(HobbitError, match="not open"):
        engine.stats()


def test_a_generator_after_close_says_so(tiny_gguf: Path) -> None:
    with Engine(tiny_gguf, EngineConfig(cache=CacheConfig(pools=8 << 20))) as engine:
        pieces = engine.generate(PROMPT, 8)
        next(pieces)
        engine.close()
        with pytest.raises(HobbitError, match="closed while it generated"):
            next(pieces)
        engine.open()
        assert len(_greedy(engine, PROMPT, 8)) > 0


def test_a_newer_prompt_ends_the_older_answer(engine: Engine) -> None:
    whole = _greedy(engine, "import os", 8)
    older = engine.generate(PROMPT, 8, SamplingConfig(temp=0))
    next(older)
    newer = engine.generate("import os", 8, SamplingConfig(temp=0))
    first = next(newer).text
    with pytest.raises(HobbitError, match="newer prompt has replaced"):
        next(older)
    assert first + _text(newer) == whole


def test_an_interrupt_in_the_middle_of_a_prompt_leaves_a_working_engine(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(cache=CacheConfig(pools=8 << 20), n_batch=64, n_threads=1)  # each thread asks
    with Engine(tiny_gguf, config) as engine:
        whole = _greedy(engine, PROMPT, 8)
        context = engine._opened().context
        for n_asked in (2, 40):
            asked = []

            def interrupt_later(_user_data: object, asked: list[int] = asked, last: int = n_asked) -> bool:
                time.sleep(0.001)  # it asks once in each millisecond
                asked.append(1)
                if len(asked) == last:
                    engine.interrupt()
                return engine._interrupted

            monkeypatch.setattr(context, "_abort", llama.ggml_abort_callback(interrupt_later))
            pieces = list(engine.generate("other " * 150, 8))
            assert [piece.finish for piece in pieces] == ["interrupted"]
            assert len(asked) == n_asked
            assert len(context.tokens) % 64 == 1  # the first special token is common to both prompts
            assert _greedy(engine, PROMPT, 8) == whole


def test_a_ctrl_c_that_interrupts_nothing_does_not_end_the_next(tiny_gguf: Path) -> None:
    config = EngineConfig(cache=CacheConfig(pools=8 << 20), n_ctx=64, n_threads=1)
    with Engine(tiny_gguf, config) as engine:
        with pytest.raises(KeyboardInterrupt), interrupting(engine):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with interrupting(engine):
            pieces = list(engine.generate("import os", max_tokens=2))
        assert pieces[-1].finish == "length"


def test_loading_and_reading_a_prompt_say_how_far_they_are(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "_WATCH_S", -1.0)  # at every operation
    loaded: list[float] = []
    read: list[tuple[int, int]] = []
    config = EngineConfig(cache=CacheConfig(pools=8 << 20), n_batch=64)
    with Engine(tiny_gguf, config, loaded.append) as engine:
        list(engine.generate("other " * 150, 2, on_prompt=lambda *each: read.append(each)))
        n_tokens = engine.stats().prompt_tokens
        n_layers = engine.info().n_layers
    assert loaded == sorted(loaded)
    assert loaded[-1] == 1.0
    done = [n for n, _ in read]
    assert done == sorted(done)
    assert {n for _, n in read} == {n_tokens}
    assert {0, 64, 64 + 64 // n_layers} < set(done)
    assert max(done) <= n_tokens
