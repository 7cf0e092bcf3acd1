# SPDX-License-Identifier: MIT
"""Token/s by the share of the experts in memory: one model, for what was measured and what sizes tell."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenTime:
    """A token computes for compute_s seconds, and waits wait_s if all its experts come from the disk.

    A share s of the experts in memory leaves (1 - s) ** exponent of the wait. Even use of all experts has the
    exponent 1.
    """

    compute_s: float
    wait_s: float
    exponent: float = 1.0

    @classmethod
    def fitted(cls, compute_s: float, wait_s: float, share: float, hits: float) -> "TokenTime":
        """The model whose exponent gives so many hits at this share: 1 where these are all, or assumed."""
        is_known = 0 < share < 1 and 0 < hits < 1
        exponent = math.log(1 - hits) / math.log(1 - share) if is_known else 1.0
        return cls(compute_s, wait_s, min(4.0, max(1.0, exponent)))

    def rate(self, share: float, size: float = 1.0) -> float:
        """Token/s. size: bytes of an expert, by those that wait_s counts."""
        return 1 / (self.compute_s + (1 - min(1.0, share)) ** self.exponent * self.wait_s * size)

    def __str__(self) -> str:
        waits = f"{1000 * self.wait_s:.3g} ms * (1 - share in memory) ** {self.exponent:.3g}"
        return f"{1000 * self.compute_s:.3g} ms + {waits}"
