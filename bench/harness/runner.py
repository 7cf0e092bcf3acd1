# SPDX-License-Identifier: MIT
"""Runs the arms in turn, one process for each repetition, and keeps what they measured."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm

from bench.harness import replay, routing, system
from bench.harness.arms import BY_NAME, Arm, Tiers
from bench.harness.job import Job
from bench.tables import ROOT
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.model_file import model_parts
from pyhobbit.native.threads import processor_cores
from pyhobbit.routing.trace import read_trace
from pyhobbit.settings.config import CacheConfig, Setting, format_size
from pyhobbit.settings.resolve import check_settings

_TIMEOUT_S = 3600
_BANDWIDTH_S = 1.0
_TRACE_PROMPTS, _TRACE_WARM_UP, _TRACE_TOKENS = (16,), 16, 96  # recorded traces are short


@dataclass(frozen=True)
class BenchConfig:
    """One run. limits: shares of the model file, which the process may hold, or of what else is bounded.

    low: file with the low tier.  t1, t2: thresholds of the arms that use it.  has_costs: a calibration with
    costs lies beside the model.  stock: folder with the unpatched libllama.so.  trace: routing that every arm
    replays; None leaves it to the model.  reps: repetitions.
    n_tokens, n_warm_up, seconds: decoding ends with whichever comes first, tokens or time.
    """

    model: Path
    arms: tuple[Arm, ...]
    limits: tuple[float, ...] = (0.15, 0.25, 0.4, 0.6)
    low: Path | None = None
    t1: float = 0.6  # the paper's, for Mixtral-8x7B
    t2: float = 0.9
    has_costs: bool = False
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
        for name, ok, want in (
            ("--limits", all(0 < share <= 1 for share in self.limits), "shares, above 0 to 1"),
            ("--prompts", all(n > 0 for n in self.prompts) and self.prompts, "numbers of tokens"),
            ("--reps", self.reps > 0, "a positive number"),
            ("--tokens", self.n_tokens > 0, "a positive number"),
            ("--warm-up", self.n_warm_up > 0, "a positive number"),
            ("--seconds", self.seconds > 0, "a positive number"),
            ("--threads", self.n_threads is None or self.n_threads > 0, "a positive number"),
        ):
            if not ok:
                raise ConfigError(f"{name} takes {want}")
        for arm in self.arms:
            if arm.tiers == "low" and self.low is None:
                raise ConfigError(f"the arm {arm.name} needs a low tier; give --low TYPE, or leave it out")
            if arm.tiers == "priced" and not self.has_costs:
                raise ConfigError(f"the arm {arm.name} needs --low TYPE --calibration FILE; or leave it out")
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


@dataclass(frozen=True)
class Turn:
    """One arm at one limit; limit None: no limit."""

    arm: Arm
    limit: float | None
    repetition: int


RunTurn = Callable[[BenchConfig, Turn, Path], dict[str, Any]]
"""Measures in one process: results or an error; the path is the routing's."""


def choose_arms(
    names: Sequence[str] | None, tiers: Collection[Tiers], arms: Mapping[str, Arm] = BY_NAME
) -> tuple[Arm, ...]:
    """The arms of these names; None for all that the files allow, which have `tiers`. Raises ConfigError."""
    for name in names or ():
        if name not in arms:
            raise ConfigError(f"unknown arm '{name}'; choose one of {', '.join(arms)}")
    if names is not None:
        return tuple(arms[name] for name in dict.fromkeys(names))
    return tuple(arm for arm in arms.values() if arm.tiers in tiers)


def turns(config: BenchConfig) -> list[Turn]:
    """Each repetition runs every arm once at each of its limits, so that drift meets all alike."""
    return [
        Turn(arm, limit, repetition)
        for repetition in range(config.reps)
        for limit in (None, *config.limits)
        for arm in config.arms
        if arm.fits in (None, limit is None)
    ]


def run(config: BenchConfig, results: Path) -> list[dict[str, Any]]:
    """Runs everything in memory cgroups, as take_turns() does. Raises HobbitError."""
    if any(turn.limit is not None for turn in turns(config)):
        with system.memory_cgroup(None):
            pass
    return take_turns(config, results, description(config), run_turn)


def take_turns(
    config: BenchConfig, results: Path, head: dict[str, Any], run_turn: RunTurn
) -> list[dict[str, Any]]:
    """Writes a line of JSON about the run to `results`, the head, then one for each turn.

    A turn that fails has an "error" in place of figures. Raises HobbitError for what no turn can do without.
    """
    records = [head]
    with ExitStack() as stack:
        routes = stack.enter_context(_routing_file(config))
        results.parent.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(results.open("x", encoding="utf-8"))
        print(json.dumps(head), file=file, flush=True)
        for turn in tqdm(turns(config), desc="bench", unit="run", disable=None):
            records.append(run_turn(config, turn, routes))
            print(json.dumps(records[-1]), file=file, flush=True)
    return records


@contextmanager
def _routing_file(config: BenchConfig) -> Iterator[Path]:
    shape = routing.moe_shape(config.model)
    arrays: dict[str, Any] = {"sweep": routing.sweep(shape).experts}
    if config.trace is not None:
        laid = routing.lay_over(read_trace(config.trace), shape)
        arrays |= {"experts": laid.experts, "weights": laid.weights}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "routing.npz"
        np.savez(path, **arrays)
        yield path


def run_turn(config: BenchConfig, turn: Turn, routes: Path) -> dict[str, Any]:
    """With the disk's bandwidth measured right before and after: a shared disk's drifts."""
    before = system.disk_bandwidth(config.model, _BANDWIDTH_S)
    record = _run_limited(config, turn, routes)
    after = system.disk_bandwidth(config.model, _BANDWIDTH_S)
    bandwidth = None if before is None or after is None else (before + after) / 2
    return record | {"disk_bytes_per_second": bandwidth}


def _run_limited(config: BenchConfig, turn: Turn, routes: Path) -> dict[str, Any]:
    """Runs an arm within its limit, with an empty page cache at its start."""
    arm = turn.arm
    size = config.model_bytes
    limit = None if turn.limit is None else int(size * turn.limit)
    record = record_of(turn, limit)
    system.drop_cached(config.files)
    with system.readahead(config.model, arm.readahead_kb), _cgroup(limit) as cgroup:
        done = start(job(config, arm, limit, routes), cgroup)
        peak = cgroup.peak() if cgroup else None
    if done.returncode:
        return record | {"error": reason(done, limit)}
    return record | json.loads(done.stdout) | {"peak_bytes": peak}


def record_of(turn: Turn, limit_bytes: int | None) -> dict[str, Any]:
    """Begin of a turn's record."""
    return {
        "kind": "result", "arm": turn.arm.name, "limit": turn.limit, "limit_bytes": limit_bytes,
        "repetition": turn.repetition,
    }  # fmt: skip


@contextmanager
def _cgroup(limit: int | None) -> Iterator[system.Cgroup | None]:
    """Without a limit none is needed; where there can be one, it counts the memory."""
    with ExitStack() as stack:
        cgroup = None
        try:
            cgroup = stack.enter_context(system.memory_cgroup(limit))
        except system.NoCgroupError:
            if limit is not None:
                raise
        yield cgroup


def job(config: BenchConfig, arm: Arm, limit: int | None, routes: Path) -> Job:
    """The job for the arm's process."""
    return Job(
        model=str(config.model.absolute()),  # its companions are found by its name
        lib_dir=str(config.stock.resolve()) if arm.build == "stock" else None,
        routing=str(routes),
        settings=settings(config, arm, _bound(config, limit)) if arm.build == "ours" else {},
        mmap=arm.mmap and limit is not None,
        repack=arm.repack and (limit is None or arm.build == "ours"),
        fits=limit is None if arm.fits is None else arm.fits,
        n_threads=config.n_threads or processor_cores(),
        prompts=config.prompts,
        n_batch=arm.n_batch,
        n_warm_up=config.n_warm_up,
        n_tokens=config.n_tokens,
        seconds=config.seconds,
    )


def _bound(config: BenchConfig, limit: int | None) -> dict[str, Setting]:
    """The whole limit is ours to use, but for a margin; without one the pools may hold everything."""
    if limit is None:
        return {"hobbit.pools": 2 * config.model_bytes}
    return {"hobbit.memory": max(1, limit - max(config.min_margin, int(limit * config.margin)))}


def settings(config: BenchConfig, arm: Arm, bound: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings of the expert cache, under a bound on its memory."""
    tiers: dict[str, Setting] = {"hobbit.t1": 1.0, "hobbit.t2": 1.0}  # whatever the file says
    if arm.tiers != "high":
        assert config.low is not None  # BenchConfig refuses the arm without it
        priced: dict[str, Setting] = {"hobbit.rule": "price"}
        thresholds: dict[str, Setting] = {"hobbit.t1": config.t1, "hobbit.t2": config.t2}
        tiers = {"hobbit.sidecar": config.low.name, **(priced if arm.tiers == "priced" else thresholds)}
    own: dict[str, Setting] = {
        "hobbit.enable": True,
        "hobbit.calibrated": config.has_costs and arm.tiers != "high",  # its division of the pools
        "hobbit.device": "CPU",
    }
    return {**own, **bound, **tiers, **arm.settings}


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


def reason(done: "subprocess.CompletedProcess[str]", limit: int | None = None) -> str:
    """Why a process failed, of which `limit` bytes bounded the memory."""
    if done.returncode in (-9, 137):
        return f"it was killed: {format_size(limit) if limit else 'the memory'} was not enough"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    own = [line.removeprefix("bench: ") for line in lines if line.startswith("bench: ")]
    told = [line for line in lines if "hobbit" in line and ("error" in line or "fail" in line)]
    return " / ".join([*(own or lines[-1:]), *told[:1]]) or f"it ended with status {done.returncode}"


#
# description
#


def description(config: BenchConfig) -> dict[str, Any]:
    """Context of the figures: model, options, machine, versions."""
    setting = system.readahead_setting(config.model)
    return {
        "kind": "run",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "pyhobbit": version("pyhobbit"),
        "commit": _commit(),
        "llama_cpp": version("llama-cpp-python"),
        "machine": system.machine(),
        "model": config.model.name,
        "model_bytes": config.model_bytes,
        "moe": asdict(routing.moe_shape(config.model)),
        "readahead_kb": int(setting.read_text()) if setting else None,
        "routing": f"replayed from {config.trace.name}" if config.trace else "the model's own",
        "options": {
            "arms": {arm.name: arm.summary for arm in config.arms},
            "batches": {arm.name: arm.n_batch for arm in config.arms if arm.n_batch is not None},
            "low": config.low.name if config.low else None,
            **{name: getattr(config, name) for name in ("limits", "t1", "t2", "reps", "prompts")},
            **{name: getattr(config, name) for name in ("n_tokens", "n_warm_up", "seconds")},
            "n_threads": config.n_threads or processor_cores(),
        },
    }


def _commit() -> str | None:
    """Commit of this checkout, with "+" for changes that are not in it; None outside of one."""
    if not (ROOT / ".git").exists():
        return None
    git = ["git", "-C", str(ROOT)]
    done = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changes = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False)
    return None if done.returncode else done.stdout.strip() + ("+" if changes.returncode else "")


def trace_windows(trace: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds to the fields `given` of a BenchConfig the windows that they lack, so that they fit the trace.

    Prompts, warm-up and decoding take different rows. Raises HobbitError if the given ones need more.
    """
    require_file(trace)
    n_rows = routing.n_complete(read_trace(trace))
    windows = {"prompts": _TRACE_PROMPTS, "n_warm_up": _TRACE_WARM_UP, **given}
    n_before = sum(windows["prompts"]) + windows["n_warm_up"]
    windows.setdefault("n_tokens", max(1, min(_TRACE_TOKENS, n_rows - n_before)))
    if (n_needed := n_before + windows["n_tokens"]) > n_rows:
        raise ConfigError(
            f"{trace} has {n_rows} tokens, and the prompts, the warm-up and decoding need {n_needed}, since "
            "no token is replayed twice; give fewer with --prompts, --warm-up or --tokens"
        )
    return windows


def require_file(path: Path) -> None:
    """Raises HobbitError where there is none."""
    if not path.is_file():
        raise HobbitError(f"{path} is not a file")


def resolved(config: BenchConfig) -> BenchConfig:
    """The configuration with absolute paths. Raises HobbitError for a file that is not there."""
    for path in filter(None, (config.model, config.low, config.trace)):
        require_file(path)
    return replace(config, model=config.model.absolute(), low=config.low and config.low.absolute())
