# SPDX-License-Identifier: MIT
"""Input and output of a measuring process; both travel as JSON."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyhobbit.errors import HobbitError
from pyhobbit.settings.config import Setting


@dataclass(frozen=True)
class Job:
    """One arm's process.

    lib_dir: of stock llama.cpp; None for this package's.  routing: .npz with the arrays sweep, which chooses
    every expert once, and experts and weights where a trace is replayed, each [tokens, layers, used]. Each of
    their tokens is replayed once: prompts, n_warm_up and n_tokens need one each.
    fits: every expert is brought into memory first.
    prompts: their lengths.  n_batch: their tokens per pass; None takes what chat would take, and 512 for
    stock llama.cpp and on a device.
    n_tokens, seconds: decoding ends with whichever comes first; so does its warm-up, of n_warm_up tokens.
    device: of ggml's, that has all layers; None leaves them where llama.cpp puts them.  rpc: server that
    offers it, HOST:PORT.  n_cpu_moe: the experts of the first so many layers stay with the CPU, as by
    llama.cpp's option of that name (stock).  moe_cache: bytes of newer llama.cpp's own cache of experts.
    fit: bytes that experts may take of the device, beside all else, where --fit places them (stock).
    """

    model: str
    lib_dir: str | None
    routing: str
    settings: dict[str, Setting] = field(default_factory=dict)
    mmap: bool = False
    repack: bool = False
    fits: bool = False
    n_threads: int = 1
    prompts: tuple[int, ...] = (16, 128, 512)
    n_batch: int | None = None
    n_warm_up: int = 32
    n_tokens: int = 64
    seconds: float = 60.0
    device: str | None = None
    rpc: str | None = None
    n_cpu_moe: int = 0
    moe_cache: int = 0
    fit: int = 0


@dataclass(frozen=True)
class Measured:
    """One repetition of one arm. Seconds and bytes; None where the arm has no such figure.

    ttft_s: first token by prompt length, the shortest prompt first, before decoding.  ttft_bytes: read from
    disk meanwhile.  n_batch: tokens of a prompt per pass.
    prefill_tokens_per_second: of the longest prompt.  disk_bytes_per_token: read while decoding.
    Counters of the cache are those of decoding: stall_share of the time, hit_rate of 0 to 1.
    logits_crc: of the logits after the first prompt, to tell whether two arms compute the same.
    device_bytes: of the device's memory that were taken; None where it does not say.
    """

    load_s: float
    ttft_s: dict[str, float]
    ttft_bytes: dict[str, int]
    n_batch: int
    prefill_tokens_per_second: float
    n_decoded: int
    decode_s: float
    tokens_per_second: float
    disk_bytes_per_token: float
    peak_rss_bytes: int
    logits_crc: int
    hit_rate: float | None = None
    stall_share: float | None = None
    device_bytes: int | None = None
    counters: dict[str, float] = field(default_factory=dict)
    info: dict[str, float] = field(default_factory=dict)


def tell(measure: Callable[[], Mapping[str, Any]]) -> int:
    """The main() of a measuring process: writes the result of `measure` to standard output.

    Returns the exit status: 1, with a sentence on standard error, where it raises HobbitError.
    """
    try:
        found = measure()
    except HobbitError as e:
        print(f"bench: {e}", file=sys.stderr)
        return 1
    json.dump(found, sys.stdout)
    return 0
