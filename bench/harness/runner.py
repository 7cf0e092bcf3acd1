# SPDX-License-Identifier: MIT
"""Runs the arms in turn, one process for each repetition, and keeps what they measured."""

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm

from bench.harness import system, trace
from bench.harness.arms import BY_NAME, Arm
from bench.harness.system import ROOT
from bench.harness.worker import Job
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.model_file import model_parts, read_model_file
from pyhobbit.native.threads import processor_cores
from pyhobbit.quality.stored import Calibration
from pyhobbit.settings.config import Setting, format_size

_TIMEOUT_S = 3600
Record = dict[str, Any]


class ArmError(HobbitError):
    """The process of an arm failed."""


def _share(text: str) -> float | None:
    if text == "none":
        return None
    with suppress(ValueError):
        if 0 < float(text) <= 1:
            return float(text)
    raise ArgumentTypeError(f"{text} is no share; give numbers above 0 to 1, or none")


def _option(name: str, default: Any, text: str, kind: Callable[[str], Any] | None = None) -> Any:
    """A field that an option of the command line gives. kind: of a value, where it is not the default's."""
    several = {"nargs": "*", "type": kind or int} if isinstance(default, tuple) else {}
    given = {"type": kind or type(default), "metavar": name.upper(), "help": text, **several}
    return field(default=default, metadata={"name": name, "given": given})


@dataclass(frozen=True)
class BenchConfig:
    """One run. low: file with the low tier.  fills: the model has a calibration that fills the pools.

    Decoding ends by its tokens or seconds, whichever comes first.
    """

    model: Path
    arms: tuple[Arm, ...]
    low: Path | None = None
    fills: bool = False
    limits: tuple[float, ...] = _option(
        "limits",
        (0.15, 0.25, 0.4, 0.6),
        "shares of the model, or of the experts on a device; or none",
        _share,
    )
    reps: int = _option("reps", 5, "repetitions (default: 5)")
    prompts: tuple[int, ...] = _option("prompts", (16, 128, 512), "tokens of prompts")
    depth: int = _option("depth", 0, "tokens of context before decoding (default: 0)")
    flash_attn: str = _option("flash-attn", "", "on or off (default: llama.cpp chooses)")
    n_tokens: int = _option("tokens", 64, "most tokens to decode (default: 64)")
    n_warm_up: int = _option("warm-up", 32, "most tokens before (default: 32)")
    seconds: float = _option("seconds", 60.0, "time limit of decoding (default: 60)")
    n_threads: int | None = _option("threads", None, "compute threads (default: one per core)", int)
    stock: Path = _option("stock", ROOT / "build/stock/bin", "libraries of make stock", Path)  # noqa: RUF009
    ik: Path = _option("ik", ROOT / "build/ik", "package of make ik", Path)  # noqa: RUF009

    def __post_init__(self) -> None:
        for name in ("reps", "n_tokens", "n_warm_up", "seconds", "n_threads"):
            if (getattr(self, name) or 0) <= 0 and getattr(self, name) is not None:
                raise ConfigError(f"--{self.options()[name]['name']} takes a positive number")
        if not self.prompts or min(self.prompts) <= 0 or self.depth < 0:
            raise ConfigError("--prompts and --depth take numbers of tokens")
        if self.flash_attn not in ("", "on", "off"):
            raise ConfigError(f"--flash-attn is {self.flash_attn}; choose on or off")
        for arm in self.arms:
            if arm.low and self.low is None:
                raise ConfigError(f"the arm {arm.name} needs a low tier; give --low TYPE, or leave it out")
            if arm.build == "stock" and not (self.stock / "libllama.so").exists():
                raise ConfigError(
                    f"{self.stock} holds no libllama.so for the arm {arm.name}; build stock llama.cpp with "
                    "'make stock' and give its folder with --stock, or leave its arms out (--arms)"
                )
            if arm.build == "ik" and not (self.ik / "ik_llama_cpp").exists():
                raise ConfigError(f"{self.ik} holds no ik_llama.cpp for the arm {arm.name}; run 'make ik'")

    @classmethod
    def options(cls) -> dict[str, Mapping[str, Any]]:
        """Names of options, and what argparse wants of them, by field."""
        return {each.name: each.metadata for each in fields(cls) if each.metadata}

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


def turns(config: BenchConfig) -> list[tuple[Arm, float | None]]:
    """Arms and limits of each run, None for no limit, in an order in which drift meets all alike."""
    return [
        (arm, limit)
        for _ in range(config.reps)
        for limit in (None, *config.limits)
        for arm in config.arms
        if arm.fits in (None, limit is None)
    ]


class Host:
    """The place where arms run: this machine's memory, with each limit that of a memory cgroup."""

    arms: ClassVar[Mapping[str, Arm]] = BY_NAME
    usual: ClassVar[Mapping[str, Any]] = {}
    """Fields of a BenchConfig that have other defaults here."""

    def head(self, config: BenchConfig) -> Record:
        """Adds to the first line of a run. Raises HobbitError before anything runs."""
        if any(limit is not None for _, limit in turns(config)):
            with system.memory_cgroup(None):
                pass
        setting = system.readahead_setting(config.model)
        return {"readahead_kb": int(setting.read_text()) if setting else None}

    def limit_bytes(self, config: BenchConfig, share: float) -> int:
        return int(config.model_bytes * share)

    def measure(self, config: BenchConfig, arm: Arm, limit: int | None, folder: Path) -> Record:
        """Figures of one turn, with the speed of the disk right before and after, which drifts.

        limit: bytes, None for none.  folder: for files.  Raises HobbitError.
        """
        before = system.disk_bandwidth(config.model)
        if arm.fits and arm.build == "ours":
            config = with_uses(config, arm, folder / "all")
        system.drop_cached(config.files)
        with system.readahead(config.model, arm.readahead_kb), ExitStack() as stack:
            cgroup = None
            try:  # without a limit none is needed; where there can be one, it counts the memory
                cgroup = stack.enter_context(system.memory_cgroup(limit))
            except system.NoCgroupError:
                if limit is not None:
                    raise
            found = start(job(config, arm, limit), cgroup, limit)
            peak = cgroup.peak() if cgroup else None
        after = system.disk_bandwidth(config.model)
        speed = None if before is None or after is None else (before + after) / 2
        return {**found, "peak_bytes": peak, "disk_bytes_per_second": speed}


def run(config: BenchConfig, target: Host) -> Iterator[Record]:
    """Yields a record about the run, then those of each turn: figures or an "error". Raises HobbitError."""
    yield description(config) | target.head(config)
    with tempfile.TemporaryDirectory() as folder:
        for arm, share in tqdm(turns(config), desc="bench", unit="run", disable=None):
            limit = None if share is None else target.limit_bytes(config, share)
            place = {"arm": arm.name, "limit": share, "limit_bytes": limit}
            try:
                yield place | target.measure(config, arm, limit, Path(folder))
            except ArmError as e:
                yield place | {"error": str(e)}


def with_uses(
    config: BenchConfig, arm: Arm, folder: Path, uses: Callable[[], Sequence[int]] | None = None
) -> BenchConfig:
    """A link to the model, beside a calibration by which all experts are loaded before the first token.

    folder: of the links, made once for arms with a low tier and once for the others.  uses: of each layer's
    experts, which decide their order; None: any order.
    """
    link = folder.with_name(f"{folder.name}{'-low' * arm.low}") / config.model.name
    if not link.exists():
        file = read_model_file(config.model, config.low)
        n = len(file.blocks) * file.n_experts
        chosen = (1000 + np.random.default_rng(1).permutation(n) % 10).tolist() if uses is None else uses()
        link.parent.mkdir()
        for path in config.files:
            link.with_name(path.name).symlink_to(path.absolute())
        low_bytes = file.tiers[-1].n_bytes if arm.low else 0
        Calibration(config.model_bytes, low_bytes, expert_uses=tuple(chosen)).write(link)
    return replace(config, model=link, fills=True)


def job(config: BenchConfig, arm: Arm, limit: int | None) -> Job:
    """The job for the arm's process. Without a limit our pools may hold everything."""
    bound = {"hobbit.pools": 2 * config.model_bytes}
    if limit is not None:
        # page tables and pages of libraries and files take the rest
        bound = {"hobbit.memory": max(1, limit - max(32 << 20, limit // 100))}
    return Job(
        model=str(config.model.absolute()),  # its companions are found by its name
        lib_dir={"stock": str(config.stock.resolve()), "ik": str(config.ik.resolve())}.get(arm.build),
        settings=settings(config, arm, bound) if arm.build == "ours" else {},
        mmap=arm.mmap and limit is not None,
        repack=arm.repack and (limit is None or arm.build == "ours"),
        n_threads=config.n_threads or processor_cores(),
        n_batch=arm.n_batch,
        **{
            name: getattr(config, name)
            for name in ("prompts", "depth", "flash_attn", "n_warm_up", "n_tokens", "seconds")
        },
    )


def settings(config: BenchConfig, arm: Arm, bound: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings of the expert cache, under a bound on its memory."""
    own: dict[str, Setting] = {"hobbit.enable": True, "hobbit.calibrated": config.fills}
    own |= {"hobbit.device": "CPU", "hobbit.t1": 1.0, "hobbit.t2": 1.0}  # whatever the file says
    if arm.low:
        assert config.low is not None  # BenchConfig refuses the arm without it
        own["hobbit.sidecar"] = config.low.name
    return {**own, **bound, **arm.settings}


def start(
    what: Job,
    cgroup: system.Cgroup | None = None,
    limit: int | None = None,
    program: Sequence[str] = ("-m", "bench.harness.worker"),
    environment: Mapping[str, str] | None = None,
) -> Record:
    """The figures of a measuring process, which runs in the cgroup if there is one. Raises ArmError.

    limit: bytes that bound its memory.  program: for the interpreter.  environment: further variables.
    """
    command = [sys.executable, *program]
    if cgroup is not None:
        command = cgroup.joining(command)
    try:
        done = subprocess.run(
            command, input=json.dumps(asdict(what)), capture_output=True, text=True, errors="replace",
            timeout=_TIMEOUT_S, cwd=ROOT, check=False, env={**os.environ, **(environment or {})},
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise ArmError(f"it took more than {_TIMEOUT_S} s") from e
    if done.returncode:
        raise ArmError(_reason(done, limit))
    return json.loads(done.stdout)


def _reason(done: "subprocess.CompletedProcess[str]", limit: int | None) -> str:
    if done.returncode in (-9, 137):
        return f"it was killed: {format_size(limit) if limit else 'the memory'} was not enough"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("pyhobbit: error: ")]
    told = [line for line in lines if "hobbit" in line and ("error" in line or "fail" in line)]
    found = [line.removeprefix("pyhobbit: error: ") for line in (*(own or lines[-1:]), *told[:1])]
    return " / ".join(dict.fromkeys(found)) or f"it ended with status {done.returncode}"


def description(config: BenchConfig) -> Record:
    """Context of the figures: model, options, machine, versions."""
    options = {name: getattr(config, name) for name in config.options() if name not in ("stock", "ik")}
    options |= {"low": config.low and config.low.name, "n_threads": config.n_threads or processor_cores()}
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "pyhobbit": version("pyhobbit"),
        "commit": commit or None,
        "llama_cpp": version("llama-cpp-python"),
        "machine": system.machine(),
        "model": config.model.name,
        "model_bytes": config.model_bytes,
        "moe": asdict(trace.moe_shape(config.model)),
        "options": options,
        "arms": {arm.name: arm.summary for arm in config.arms},
    }
