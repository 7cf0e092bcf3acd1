# SPDX-License-Identifier: MIT
"""The text that is computed: random tokens, the same in every run."""

import random
from collections.abc import Iterator

_FIRST_PLAIN_TOKEN = 300  # after control tokens and bytes


def random_tokens(n_vocab: int) -> Iterator[int]:
    """Without end, each of the plain tokens equally likely."""
    draw = random.Random(1)
    while True:
        yield draw.randrange(min(_FIRST_PLAIN_TOKEN, n_vocab // 2), n_vocab)
