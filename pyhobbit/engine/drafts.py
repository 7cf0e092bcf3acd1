# SPDX-License-Identifier: MIT
"""Speculative decoding: tokens that the text suggests are computed in one pass with the last.

The model's own choice after each of them decides how many count (Leviathan et al., arXiv 2211.17192, with a
lookup in the text in place of a draft model).
"""

import time
from collections.abc import Iterable

from pyhobbit.engine.llama import Context, Sampler, Watch
from pyhobbit.errors import HobbitError

_N_GRAM = 3  # shorter ones suggest wrong tokens more often than right ones: docs/measurements.md


class Lookup:
    """Finds the last earlier occurrence of a text's last tokens, and what followed it."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            if len(self._tokens) >= _N_GRAM:
                self._after[tuple(self._tokens[-_N_GRAM:])] = len(self._tokens)
            self._tokens.append(token)

    def draft(self, n: int) -> list[int]:
        """At most n tokens; none where the last ones are new."""
        place = self._after.get(tuple(self._tokens[-_N_GRAM:]))
        return [] if place is None else self._tokens[place : place + n]


class Governor:
    """How many tokens to draft, at most `most`: as many as pay by measured time.

    A pass with drafts earns its tokens and costs its time, in passes of one token. Drafts pause when they
    have cost more than they earned, each time for longer; what they earned lets them lose a little again.
    Right drafts become more as long as more of them take less time per token.
    """

    _LEAST_PLAIN = 4  # passes of one token before the first draft: the first ones read more
    _CREDIT, _DEBT = 4.0, 1.0  # passes
    _PAUSES = 32, 1024  # passes: the first one and the longest
    _RETRY = 128  # passes with drafts, after which all widths are tried again

    def __init__(self, most: int) -> None:
        self._most = most
        self._width = 1
        self._n_plain, self._plain_s = 0, 0.0
        self._seconds: dict[int, float] = {}  # seconds of the last pass, by number of drafts
        self._n_drafted_passes = 0
        self._balance = 0.0
        self._n_paused, self._pause = 0, self._PAUSES[0]

    @property
    def width(self) -> int:
        """Tokens to draft for the next pass."""
        return 0 if self._n_paused or self._n_plain < self._LEAST_PLAIN else self._width

    def note(self, n_drafted: int, n_accepted: int, seconds: float) -> None:
        """Records the time of a pass, and the number of right drafts."""
        if n_drafted == 0:
            self._n_plain += 1
            self._plain_s += (seconds - self._plain_s) / min(self._n_plain, 16)
            self._n_paused = max(0, self._n_paused - 1)
            return
        gain = n_accepted + 1 - seconds / self._plain_s
        self._n_drafted_passes += 1
        if self._n_drafted_passes % self._RETRY == 0:
            self._seconds.clear()
        self._seconds[n_drafted] = seconds
        if n_accepted < n_drafted or gain > 0 or n_drafted == 1:  # otherwise they were right and too many
            self._balance = min(self._CREDIT, self._balance + gain)
        if self._balance < -self._DEBT:
            self._n_paused, self._pause = self._pause, min(2 * self._pause, self._PAUSES[1])
            self._balance, self._width = 0.0, 1
            self._seconds.clear()
            return
        if self._balance == self._CREDIT:
            self._pause = self._PAUSES[0]
        if n_accepted == n_drafted and gain > 0:
            self._width = self._best(n_drafted)
        elif gain < 0 or 2 * n_accepted < n_drafted:
            self._width = max(1, n_drafted // 2)

    def _best(self, width: int) -> int:
        """Beside this width, whose drafts were right: a wider one to try, or what takes least per token."""
        wider = min(self._most, 2 * width + 1)
        if wider not in self._seconds:
            return wider
        known = [each for each in (width // 2, width, wider) if each in self._seconds]
        return max(known, key=lambda each: (each + 1) / self._seconds[each])


class Decoder:
    """The tokens of one answer, one by one, after the context's. governor: None computes no drafts."""

    def __init__(self, context: Context, sampler: Sampler, governor: Governor | None) -> None:
        self.n_drafted = self.n_accepted = 0
        self._context, self._sampler, self._governor = context, sampler, governor
        self._lookup = Lookup(context.tokens if governor else ())
        self._computed: list[int] = []  # tokens after the last one given out

    def next(self, pending: list[int], n_wanted: int, watch: Watch | None = None) -> int | None:
        """The token after these, which the KV cache then has; None when aborted. n_wanted: still to come."""
        if self._computed:
            return self._computed.pop(0)
        if self._governor is not None:
            self._lookup.extend(pending)
            if len(pending) == 1:
                return self._pass(self._governor, pending, min(self._governor.width, n_wanted - 1))
        return self._sampler.sample(self._context) if self._context.evaluate(pending, watch) else None

    def _pass(self, governor: Governor, pending: list[int], n: int) -> int | None:
        """Computes them and at most n drafts; what these foretold goes to _computed."""
        context, start = self._context, time.perf_counter()
        drafted = self._lookup.draft(n)
        if not (context.verify([*pending, *drafted]) if drafted else context.evaluate(pending)):
            return None
        seconds = time.perf_counter() - start
        found = [self._sampler.sample(context, 0 if drafted else -1)]
        while len(found) <= len(drafted) and found[-1] == drafted[len(found) - 1]:
            found.append(self._sampler.sample(context, len(found)))
        n_accepted = len(found) - 1
        governor.note(len(drafted), n_accepted, seconds)
        self.n_drafted, self.n_accepted = self.n_drafted + len(drafted), self.n_accepted + n_accepted
        if n_accepted < len(drafted):
            self._take_back(len(drafted) - n_accepted)
        self._lookup.extend(found[:-1])
        self._computed = found[1:]
        return found[0]

    def _take_back(self, n: int) -> None:
        """Removes the last n tokens from the context. Raises HobbitError where the model cannot."""
        n_kept = len(self._context.tokens) - n
        self._context.truncate(n_kept)
        if len(self._context.tokens) < n_kept:
            raise HobbitError("this model cannot take back tokens, as drafts do; open it without drafts")
