# SPDX-License-Identifier: MIT
"""How long compute threads spin for each other before they sleep."""

import os

_SPINS = "300"  # turns of a loop, some microseconds; by default libgomp spins for milliseconds
_FEW_CORES = 4  # more cores were not measured
_CHOSEN_BY = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def short_spins() -> dict[str, str]:
    """Environment that makes libgomp spin briefly; it is read when the library is loaded. Empty: none needed.

    On a machine with few cores a thread that spins holds up whatever it waits for: the disk's work, loader
    threads, other programs. A user's own choice stands.
    """
    if len(os.sched_getaffinity(0)) > _FEW_CORES or any(name in os.environ for name in _CHOSEN_BY):
        return {}
    return {"GOMP_SPINCOUNT": _SPINS}
