# SPDX-License-Identifier: MIT
"""Runs the arms in turn, one process for each repetition, and keeps what they measured."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm

from bench.harness import replay, system, trace
from bench.harness.arms import Arm
from bench.harness.system import ROOT
from bench.harness.worker import Job
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.model_file import model_parts
from pyhobbit.native.threads import processor_cores
from pyhobbit.routing.trace import read_trace
from pyhobbit.settings.config import CacheConfig, Setting, format_size
from pyhobbit.settings.resolve import check_settings

_TIMEOUT_S = 3600
Record = dict[str, Any]


@dataclass(frozen=True)
class BenchConfig:
    """One run. limits: shares of the model file, which the process may hold, or of what else is bounded.

    low: file with the low tier.  t1, t2: thresholds of the arms that use it.  stock: folder with the
    unpatched libllama.so.  trace: routing that every arm replays; None leaves it to the model.
    n_tokens, n_warm_up, seconds: decoding ends with whichever comes first, tokens or time.
    """

    model: Path
    arms: tuple[Arm, ...]
    limits: tuple[float, ...] = (0.15, 0.25, 0.4, 0.6)
    low: Path | None = None
    t1: float = 0.6  # the paper's, for Mixtral-8x7B
    t2: float = 0.9
    stock: Path = ROOT / "build/stock/bin"
    trace: Path | None = None
    reps: int = 5
    prompts: tuple[int, ...] = (16, 128, 512)
    n_tokens: int = 64
    n_warm_up: int = 32
    seconds: float = 60.0
    n_threads: int | None = None

    min_margin: ClassVar[int] = 32 << 20  # margin of a limit: page tables, pages of libraries and other files
    margin: ClassVar[float] = 0.01

    def __post_init__(self) -> None:
        check_settings(CacheConfig(t1=self.t1, t2=self.t2).settings())
        for name, value in (
            ("reps", self.reps), ("tokens", self.n_tokens), ("warm-up", self.n_warm_up),
            ("seconds", self.seconds), ("threads", self.n_threads or 1),
        ):  # fmt: skip
            if value <= 0:
                raise ConfigError(f"--{name} takes a positive number")
        if not all(0 < share <= 1 for share in self.limits):
            raise ConfigError("--limits takes shares, above 0 to 1")
        if not self.prompts or min(self.prompts) <= 0:
            raise ConfigError("--prompts takes numbers of tokens")
        for arm in self.arms:
            if arm.low and self.low is None:
                raise ConfigError(f"the arm {arm.name} needs a low tier; give --low TYPE, or leave it out")
            if arm.build == "stock" and not (self.stock / "libllama.so").exists():
                raise ConfigError(
                    f"{self.stock} holds no libllama.so for the arm {arm.name}; build stock llama.cpp with "
                    "'make stock' and give its folder with --stock, or leave its arms out (--arms)"
                )

    @cached_property
    def parts(self) -> list[Path]:
        """The model's own files; several where it is split."""
        return [part.path for part in model_parts(self.model)]

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of which the limits are shares."""
        return sum(path.stat().st_size for path in self.parts)

    @property
    def files(self) -> list[Path]:
        """All that is read from the disk."""
        return [*self.parts, self.low] if self.low else self.parts

    def usable(self, limit: int) -> int:
        """Bytes of a limit that our own processes may plan with."""
        return max(1, limit - max(self.min_margin, int(limit * self.margin)))


@dataclass(frozen=True)
class Turn:
    """One arm at one limit; limit None: no limit."""

    arm: Arm
    limit: float | None
    repetition: int


def turns(config: BenchConfig) -> list[Turn]:
    """Each repetition runs every arm once at each of its limits, so that drift meets all alike."""
    return [
        Turn(arm, limit, repetition)
        for repetition in range(config.reps)
        for limit in (None, *config.limits)
        for arm in config.arms
        if arm.fits in (None, limit is None)
    ]


class Host:
    """The place where arms run: this machine's memory, with each limit that of a memory cgroup."""

    def head(self, config: BenchConfig) -> Record:
        """Adds to the first line of a run. Raises HobbitError before anything runs."""
        if any(turn.limit is not None for turn in turns(config)):
            with system.memory_cgroup(None):
                pass
        setting = system.readahead_setting(config.model)
        return {"readahead_kb": int(setting.read_text()) if setting else None}

    def routing(self, _shape: trace.MoeShape, _config: BenchConfig) -> trace.Routing | None:
        """The routing that is replayed without a trace; None leaves it to the model."""
        return None

    def limit_bytes(self, config: BenchConfig, share: float) -> int:
        return int(config.model_bytes * share)

    def measure(self, config: BenchConfig, turn: Turn, limit: int | None, routes: Path) -> Record:
        """The turn's figures or its "error", with the speed of the disk right before and after: it drifts."""
        before = system.disk_bandwidth(config.model)
        system.drop_cached(config.files)
        with system.readahead(config.model, turn.arm.readahead_kb), ExitStack() as stack:
            cgroup = None
            try:  # without a limit none is needed; where there can be one, it counts the memory
                cgroup = stack.enter_context(system.memory_cgroup(limit))
            except system.NoCgroupError:
                if limit is not None:
                    raise
            done = start(job(config, turn.arm, limit, routes), cgroup)
            peak = cgroup.peak() if cgroup else None
        after = system.disk_bandwidth(config.model)
        speed = None if before is None or after is None else (before + after) / 2
        return {**result(done, limit), "peak_bytes": peak, "disk_bytes_per_second": speed}


def run(config: BenchConfig, tell: Callable[[Record], object], target: Host | None = None) -> list[Record]:
    """Tells a record about the run, then one for each turn: figures or an "error". Raises HobbitError."""
    target = target or Host()
    records = [description(config) | target.head(config)]
    with _routing_file(config, target) as routes:
        tell(records[0])
        for turn in tqdm(turns(config), desc="bench", unit="run", disable=None):
            limit = None if turn.limit is None else target.limit_bytes(config, turn.limit)
            place = {"kind": "result", "arm": turn.arm.name, "limit": turn.limit, "limit_bytes": limit}
            found = target.measure(config, turn, limit, routes)
            records.append(place | {"repetition": turn.repetition} | found)
            tell(records[-1])
    return records


@contextmanager
def _routing_file(config: BenchConfig, target: Host) -> Iterator[Path]:
    shape = trace.moe_shape(config.model)
    arrays: dict[str, Any] = {"sweep": trace.sweep(shape).experts}
    laid = trace.lay_over(read_trace(config.trace), shape) if config.trace else target.routing(shape, config)
    if laid is not None:
        arrays |= {"experts": laid.experts, "weights": laid.weights}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routing.npz"
        np.savez(path, **arrays)
        yield path


def job(config: BenchConfig, arm: Arm, limit: int | None, routes: Path) -> Job:
    """The job for the arm's process. Without a limit our pools may hold everything."""
    bound = {"hobbit.pools": 2 * config.model_bytes}
    if limit is not None:
        bound = {"hobbit.memory": config.usable(limit)}
    return Job(
        model=str(config.model.absolute()),  # its companions are found by its name
        lib_dir=str(config.stock.resolve()) if arm.build == "stock" else None,
        routing=str(routes),
        settings=settings(config, arm, bound) if arm.build == "ours" else {},
        mmap=arm.mmap and limit is not None,
        repack=arm.repack and (limit is None or arm.build == "ours"),
        fits=limit is None if arm.fits is None else arm.fits,
        n_threads=config.n_threads or processor_cores(),
        n_batch=arm.n_batch,
        **{name: getattr(config, name) for name in ("prompts", "n_warm_up", "n_tokens", "seconds")},
    )


def settings(config: BenchConfig, arm: Arm, bound: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings of the expert cache, under a bound on its memory."""
    own: dict[str, Setting] = {"hobbit.enable": True, "hobbit.calibrated": False, "hobbit.device": "CPU"}
    own |= {"hobbit.t1": 1.0, "hobbit.t2": 1.0}  # whatever the file says
    if arm.low:
        assert config.low is not None  # BenchConfig refuses the arm without it
        own |= {"hobbit.t1": config.t1, "hobbit.t2": config.t2, "hobbit.sidecar": config.low.name}
    return {**own, **bound, **arm.settings}


def start(
    what: Job,
    cgroup: system.Cgroup | None,
    program: Sequence[str] = ("-m", "bench.harness.worker"),
    environment: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Runs the measuring process to its end, in the cgroup if there is one.

    program: for the interpreter.  environment: variables in addition to this process's.
    """
    replay.library()  # compiled before a limit on memory applies
    command = [sys.executable, *program]
    if cgroup is not None:
        command = cgroup.joining(command)
    try:
        return subprocess.run(
            command, input=json.dumps(asdict(what)), capture_output=True, text=True, errors="replace",
            timeout=_TIMEOUT_S, cwd=ROOT, check=False, env={**os.environ, **(environment or {})},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"bench: it took more than {_TIMEOUT_S} s")


def result(done: "subprocess.CompletedProcess[str]", limit: int | None = None) -> Record:
    """The figures of a process, or its "error". limit: bytes that bounded its memory."""
    return {"error": reason(done, limit)} if done.returncode else json.loads(done.stdout)


def reason(done: "subprocess.CompletedProcess[str]", limit: int | None = None) -> str:
    """Why a process failed, of which `limit` bytes bounded the memory."""
    if done.returncode in (-9, 137):
        return f"it was killed: {format_size(limit) if limit else 'the memory'} was not enough"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    own = [line.removeprefix("bench: ") for line in lines if line.startswith("bench: ")]
    told = [line for line in lines if "hobbit" in line and ("error" in line or "fail" in line)]
    return " / ".join([*(own or lines[-1:]), *told[:1]]) or f"it ended with status {done.returncode}"


def description(config: BenchConfig) -> Record:
    """Context of the figures: model, options, machine, versions."""
    paths = ("model", "stock", "trace")
    options = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in paths}
    options["arms"] = {arm.name: arm.summary for arm in config.arms}
    options |= {"low": config.low and config.low.name, "n_threads": config.n_threads or processor_cores()}
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "kind": "run",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "pyhobbit": version("pyhobbit"),
        "commit": commit or None,
        "llama_cpp": version("llama-cpp-python"),
        "machine": system.machine(),
        "model": config.model.name,
        "model_bytes": config.model_bytes,
        "moe": asdict(trace.moe_shape(config.model)),
        "routing": f"replayed from {config.trace.name}" if config.trace else "the model's own",
        "options": options,
    }


def trace_windows(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds to the fields `given` of a BenchConfig the windows that they lack, so that they fit the trace.

    Prompts, warm-up and decoding take different rows. Raises HobbitError if the given ones need more.
    """
    require_file(path)
    n_rows = trace.n_complete(read_trace(path))
    windows = {"prompts": (16,), "n_warm_up": 16, **given}  # recorded traces are short
    n_before = sum(windows["prompts"]) + windows["n_warm_up"]
    windows.setdefault("n_tokens", max(1, min(96, n_rows - n_before)))
    if (n_needed := n_before + windows["n_tokens"]) > n_rows:
        raise ConfigError(
            f"{path} has {n_rows} tokens, and the prompts, the warm-up and decoding need {n_needed}, since "
            "no token is replayed twice; give fewer with --prompts, --warm-up or --tokens"
        )
    return windows


def require_file(path: Path) -> None:
    """Raises HobbitError where there is none."""
    if not path.is_file():
        raise HobbitError(f"{path} is not a file")
