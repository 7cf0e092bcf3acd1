# SPDX-License-Identifier: MIT
"""What an open model has computed, by token and answer."""

from dataclasses import dataclass

from pyhobbit.engine.stats import CacheStats, ModelInfo, Stats, peak_rss_bytes


@dataclass
class Counters:
    """evaluated: all tokens that were computed; of these, fed_back were generated before.

    reused: tokens of prompts that were still in the KV cache.
    """

    answers: int = 0
    evaluated: int = 0
    fed_back: int = 0
    reused: int = 0
    generated: int = 0
    first_tokens_s: float = 0.0
    decode_s: float = 0.0

    def count(self, seconds: float, n_evaluated: int, n_prompt: int | None, ends: bool) -> None:
        """A token of an answer. n_prompt: tokens of the prompt, for the first one. ends: it has no text."""
        if n_prompt is None:
            self.fed_back += n_evaluated
        else:
            self.reused += n_prompt - n_evaluated
        if ends:
            return
        self.generated += 1
        if n_prompt is None:
            self.decode_s += seconds
        else:
            self.answers += 1
            self.first_tokens_s += seconds

    def stats(self, info: ModelInfo, cache: CacheStats, load_s: float) -> Stats:
        """With what the model and its cache say of themselves."""
        n_prompt = self.evaluated - self.fed_back
        return Stats(
            info=info,
            cache=cache,
            load_s=load_s,
            peak_rss_bytes=peak_rss_bytes(),
            answers=self.answers,
            prompt_tokens=n_prompt + self.reused,
            prompt_tokens_evaluated=n_prompt,
            generated_tokens=self.generated,
            decoded_tokens=self.generated - self.answers,
            first_tokens_s=self.first_tokens_s,
            decode_s=self.decode_s,
        )
