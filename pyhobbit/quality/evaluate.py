# SPDX-License-Identifier: MIT
"""Quality loss by low precision: perplexity, and divergence from high precision, on a text."""

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from pyhobbit._tables import RULES
from pyhobbit.engine.cached import Closing
from pyhobbit.engine.llama import Model
from pyhobbit.engine.session import Session
from pyhobbit.engine.stats import CacheStats, ModelInfo
from pyhobbit.errors import HobbitError
from pyhobbit.native.ffi import ffi, llama
from pyhobbit.routing.observe import LayerEvent, layer_event
from pyhobbit.settings.config import CalibrationConfig, EngineConfig, Setting, format_size

Chunk = list[int]
"""Token ids of a piece of text that is computed on its own."""

Progress = Callable[[int], object]
"""Told how many tokens have been computed since the last call."""

CONFIDENCE = 0.95
"""Confidence level of a Quality's upper bound."""

Memo = Callable[[str, Callable[[], "Quality"]], "Quality"]
"""Gives what is known under a name, or measures it."""

_BLOCK_FLOATS = 1 << 20  # worked on at once
_MEMORY_FLOATS = 16 << 20  # larger arrays lie in a temporary file


@dataclass(frozen=True)
class Quality:
    """One setting on one text. numbers: of the rule, by option.

    perplexity: as llama-perplexity counts it.  perplexity_ratio: to that in high precision.
    mean_kl, p99_kl: mean and 99th percentile of the Kullback-Leibler divergence of the predictions from those
    in high precision, in nats per token.  total_variation: mean, 0 to 1; of drawn tokens at least so many
    differ.  same_top1: share of the tokens whose most probable successor is that in high precision.
    share_*: of the (token, expert) selections.
    bytes_per_token: of the experts that a token asks for, as if none were resident.
    kl_at_most: bound with CONFIDENCE, see upper_bound(); infinite for too few chunks.
    """

    numbers: dict[str, Any]
    perplexity: float
    perplexity_ratio: float
    mean_kl: float
    p99_kl: float
    total_variation: float
    same_top1: float
    share_high: float
    share_low: float
    share_skipped: float
    bytes_per_token: float
    kl_at_most: float


def measure_now(_name: str, measure: Callable[[], Quality]) -> Quality:
    """A Memo that knows nothing."""
    return measure()


@dataclass(frozen=True)
class Costs:
    """Nats of divergence that a use of weight 1 adds, in low precision and skipped. inf: never.

    By layer, or by layer and expert (layer * n_experts + expert). With the rule price a use of normalised
    weight w adds about w**2 times as much.
    """

    low: tuple[float, ...]
    skip: tuple[float, ...]

    def of(self, layers: Sequence[int], experts: np.ndarray, n_layers: int) -> tuple[np.ndarray, np.ndarray]:
        """Costs of selections in low precision, and skipped; experts, and both results: [T, L, K] of L
        layers."""
        per_layer = len(self.low) // n_layers
        place = np.asarray(layers)[:, None] * per_layer + (experts if per_layer > 1 else 0)
        place = np.broadcast_to(place, experts.shape)
        return np.asarray(self.low)[place], np.asarray(self.skip)[place]


def evaluation_settings(config: EngineConfig, rule: str) -> dict[str, Setting]:
    """Settings for hobbit_open, without a calibration that lies beside the model."""
    return {
        "hobbit.enable": True,
        "hobbit.calibrated": False,
        "hobbit.t1": 1.0,
        "hobbit.t2": 1.0,
        "hobbit.policy": "lru" if config.cache.weights is None else "hobbit",
        "hobbit.prefetch": 0,
        "hobbit.device": "CPU",
        **config.overrides,
        **config.cache.settings(),
        "hobbit.strict": True,
        "hobbit.rule": rule,
    }


class Evaluator(Closing):
    """A model for computing chunks of text, in the rule's precisions. A context manager. Not thread-safe.

    Each token gets the precision that the rule decides for it, whatever is resident and whatever other tokens
    of its batch ask for.
    """

    def __init__(self, path: Path, config: EngineConfig | None = None, rule: str = "gate") -> None:
        """config.n_ctx: tokens of a chunk.  n_batch: of a pass; None: all of them.  rule: hobbit.rule."""
        self._path, self.rule = path, rule
        self._config = config or EngineConfig()
        self._observer_error: BaseException | None = None
        settings = evaluation_settings(self._config, rule)
        self._session = Session(path, settings, self._set_context, verbose=self._config.verbose)

    def close(self) -> None:
        """Frees everything."""
        self._session.close()

    def _set_context(self, params: Any, model: Model) -> None:
        if not model.cache:
            raise HobbitError(f"{self._path} is a dense model: it has no experts to choose a precision for")
        info, by_price = model.cache.info(), self.rule in ("price", "edgemoe")
        if info["n_tiers"] > 1:
            # the context makes the pools, and these numbers need both
            if by_price:
                model.cache.set_costs(*[[0.0] * info["n_layers"]] * 2)
            model.cache.set(**({"price": 1.0} if by_price else {"t1": 0.5, "t2": 1.0}))
        engine = self._config
        self.n_ctx = min(engine.n_ctx or CalibrationConfig.default_n_ctx, model.n_ctx_train())
        params.n_ctx = params.n_batch = params.n_outputs_max = self.n_ctx
        params.n_ubatch = min(engine.n_batch or self.n_ctx, self.n_ctx)
        params.n_threads = params.n_threads_batch = engine.computing_threads(engine.n_threads)

    # --- the model

    @property
    def info(self) -> ModelInfo:
        """Figures of the opened model."""
        return self._session.info(self._config.cache.memory)

    @property
    def stats(self) -> CacheStats:
        """Counters since opening."""
        return self._session.cache.stats()

    def set_costs(self, costs: Costs) -> None:
        """Sets the costs of the rule price. Raises HobbitError."""
        self._session.cache.set_costs(costs.low, costs.skip)

    def count_tokens(self, text: str) -> int:
        return len(self._session.model.tokenize(text))

    def chunks(self, text: str, at_most: int | None = None) -> list[Chunk]:
        """Cuts a text as llama-perplexity does, without its remainder. at_most: so many, evenly spaced."""
        model = self._session.model
        tokens = model.tokenize(text)
        n_all = len(tokens) // self.n_ctx
        n = min(n_all, at_most or n_all)
        starts = [i * n_all // n * self.n_ctx for i in range(n)]
        chunks = [tokens[start : start + self.n_ctx] for start in starts]
        if llama.llama_vocab_get_add_bos(model.vocab):
            for chunk in chunks:
                chunk[0] = llama.llama_vocab_bos(model.vocab)
        return chunks

    # --- computing

    def reference(self, chunks: Sequence[Chunk], progress: Progress = lambda _n_tokens: None) -> np.ndarray:
        """High-precision logits of the chunks' second halves: float32 [n_chunks, n_scored, n_vocab]."""
        model = self._session.model
        n_scored = self.n_ctx - 1 - self.n_ctx // 2
        kept = _large_array((len(chunks), n_scored, llama.llama_vocab_n_tokens(model.vocab)))
        self._session.cache.set(**RULES[self.rule])
        for i, chunk in enumerate(chunks):
            kept[i] = self._scored_logits(chunk)
            progress(len(chunk))
        return kept

    def measure(
        self,
        chunks: Sequence[Chunk],
        reference: np.ndarray,
        progress: Progress = lambda _n_tokens: None,
        **numbers: float,
    ) -> Quality:
        """These numbers of the rule on the chunks that the reference was made of. Raises HobbitError."""
        numbers = {**RULES[self.rule], **numbers}
        self._session.cache.set(**numbers)
        before = self.stats
        compared = []
        for chunk, wanted in zip(chunks, reference, strict=True):
            compared.append(compare(wanted, self._scored_logits(chunk), scored_targets(chunk)))
            progress(len(chunk))
        tokens = Comparison(*map(np.concatenate, zip(*compared, strict=True)))
        counted, info = self.stats.since(before), self.info
        n, surprise = counted.selections, np.mean(tokens.surprise)
        asked = info.used_bytes(counted.selections_high, counted.selections_low)
        return Quality(
            numbers=numbers,
            perplexity=float(np.exp(surprise)),
            perplexity_ratio=float(np.exp(surprise - np.mean(tokens.reference_surprise))),
            mean_kl=float(np.mean(tokens.divergence)),
            p99_kl=float(np.percentile(tokens.divergence, 99)),
            total_variation=float(np.mean(tokens.total_variation)),
            same_top1=float(np.mean(tokens.same_top1)),
            share_high=counted.selections_high / n,
            share_low=counted.selections_low / n,
            share_skipped=counted.selections_skipped / n,
            bytes_per_token=asked / n,
            kl_at_most=upper_bound([np.mean(of.divergence) for of in compared]),
        )

    def _scored_logits(self, chunk: Chunk) -> np.ndarray:
        logits = self._session.context.logits(chunk)
        if self._observer_error is not None:
            raise self._observer_error
        return logits[len(chunk) // 2 : -1]

    @contextlib.contextmanager
    def observing(self, observer: Callable[[LayerEvent], object]) -> Iterator[None]:
        """Within it, `observer` sees every layer. Its exceptions leave reference() or measure()."""
        cache = self._session.cache

        def keep(_kind: type, error: BaseException, _trace: TracebackType) -> None:
            self._observer_error = self._observer_error or error

        @ffi.callback("hobbit_observer", onerror=keep)
        def receive(event: Any, _user_data: object) -> None:
            observer(layer_event(event))

        cache.set_observer(receive)
        try:
            yield
        finally:
            cache.set_observer(ffi.NULL)
            self._observer_error = None


def _large_array(shape: tuple[int, ...]) -> np.ndarray:
    n_floats = math.prod(shape)
    if n_floats <= _MEMORY_FLOATS:
        return np.empty(shape, np.float32)
    try:
        with tempfile.TemporaryFile() as file:  # the mapping keeps it
            os.posix_fallocate(file.fileno(), 0, 4 * n_floats)  # a mapping finds out too late
            return np.memmap(file, np.float32, "r+", shape=shape)
    except OSError as e:
        raise HobbitError(
            f"{format_size(4 * n_floats)} for a temporary file cannot be had in {tempfile.gettempdir()} "
            f"({e.strerror}); set TMPDIR to a folder with room, or use less text"
        ) from e


# --- figures


def scored_targets(chunk: Chunk) -> np.ndarray:
    """The tokens that a chunk's scored logits predict."""
    return np.asarray(chunk[len(chunk) // 2 + 1 :])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of probabilities, float64, of the shape of logits [..., n_vocab]."""
    shifted = np.subtract(logits, logits.max(axis=-1, keepdims=True), dtype=np.float64)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class Comparison(NamedTuple):
    """Predictions beside those of a reference, one value for each token.

    surprise, reference_surprise: -ln P(target).  divergence: Kullback-Leibler, from the reference, in nats.
    total_variation: half of the sum of the differences.  same_top1: whether the most probable token is equal.
    """

    surprise: np.ndarray
    reference_surprise: np.ndarray
    divergence: np.ndarray
    total_variation: np.ndarray
    same_top1: np.ndarray


def compare(reference: np.ndarray, logits: np.ndarray, targets: np.ndarray) -> Comparison:
    """Compares logits [n, n_vocab] with those of the reference, for targets [n]."""
    blocks = []
    for rows, found in _log_softmax_blocks(logits):
        wanted = log_softmax(reference[rows])
        at_target = (np.arange(len(found)), targets[rows])
        chance = np.exp(wanted)
        divergence = (chance * (wanted - found)).sum(axis=-1)
        variation = np.abs(chance - np.exp(found)).sum(axis=-1) / 2
        same_top1 = wanted.argmax(axis=-1) == found.argmax(axis=-1)
        blocks.append((-found[at_target], -wanted[at_target], divergence, variation, same_top1))
    return Comparison(*map(np.concatenate, zip(*blocks, strict=True)))


def perplexity(reference: np.ndarray, chunks: Sequence[Chunk]) -> float:
    """Perplexity of scored logits [n_chunks, n_scored, n_vocab]."""
    targets = np.concatenate([scored_targets(chunk) for chunk in chunks])
    blocks = _log_softmax_blocks(reference.reshape(len(targets), -1))
    chances = [found[np.arange(len(found)), targets[rows]] for rows, found in blocks]
    return float(np.exp(-np.mean(np.concatenate(chances))))


def upper_bound(values: Sequence[float]) -> float:
    """The mean of the values' population is at most this with CONFIDENCE (Student's t); inf for under 3."""
    n = len(values) - 1
    if n < 2:
        return math.inf
    z = NormalDist().inv_cdf(CONFIDENCE)
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)  # Abramowitz, Stegun, 26.7.5
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return float(np.mean(values) + t * np.std(values, ddof=1) / math.sqrt(n + 1))


def _log_softmax_blocks(logits: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Some rows at a time, for the memory."""
    n_rows, n_vocab = logits.shape
    step = max(1, _BLOCK_FLOATS // n_vocab)
    for start in range(0, n_rows, step):
        rows = slice(start, min(start + step, n_rows))
        yield rows, log_softmax(logits[rows])
