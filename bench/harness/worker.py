# SPDX-License-Identifier: MIT
"""Measures one arm, in a process of its own: two builds of libllama cannot live in one.

Reads a Job as JSON from standard input and writes what measure() finds to standard output.
"""

import ctypes
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.system import bytes_from_disk
from bench.harness.trace import random_tokens
from pyhobbit.cli.main import ended
from pyhobbit.engine.stats import CacheStats, peak_rss_bytes, rates
from pyhobbit.errors import HobbitError
from pyhobbit.native.devices import Ggml, experts_on_cpu
from pyhobbit.native.rpc_servers import add_rpc_servers
from pyhobbit.settings.config import Setting, kv_overrides


class IkLlama:
    """The package below a folder, where pip's --target put it. One context at a time."""

    LLAMA_LOAD_MODE_NONE, LLAMA_LOAD_MODE_MMAP = False, True
    LLAMA_FLASH_ATTN_TYPE_DISABLED, LLAMA_FLASH_ATTN_TYPE_ENABLED = False, True

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder))
        self._own: Any = import_module("ik_llama_cpp._ctypes_api")
        self._n_past = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def llama_model_load_from_file(self, path: bytes, params: Any) -> Any:
        params.use_mmap, params.repack_tensors = params.load_mode, params.use_extra_bufts
        return self._own.llama_model_load_from_file(path, params)

    def llama_init_from_model(self, model: Any, params: Any) -> Any:
        if hasattr(params, "flash_attn_type"):  # else by its own default
            params.flash_attn = params.flash_attn_type
        return self._own.llama_init_from_model(model, params)

    def llama_get_memory(self, context: Any) -> Any:
        return context

    def llama_memory_clear(self, context: Any, _data: bool) -> None:
        self._own.llama_kv_cache_clear(context)
        self._n_past = 0

    def llama_batch_get_one(self, tokens: Any, n_tokens: int) -> Any:
        at, self._n_past = self._n_past, self._n_past + n_tokens
        return self._own.llama_batch(n_tokens, tokens, all_pos_0=at, all_pos_1=1)

    def llama_get_logits(self, context: Any) -> Any:
        return self._own.llama_get_logits_ith(context, -1)

    def llama_synchronize(self, _context: Any) -> None:
        """On a CPU a decoded batch is computed."""

    def llama_model_free(self, model: Any) -> None:
        self._own.llama_free_model(model)


_MAX_CONTEXT = 1024  # tokens; a long decode begins a new sequence when it is full
_FILLING_S = 0.5  # a pause of a disk is shorter


@dataclass(frozen=True)
class Job:
    """One arm's process. model: "" describes the device.

    lib_dir: of stock llama.cpp or ik_llama.cpp; None for this package's.
    settings: of the expert cache; a calibration among them fills the pools first.
    spread: of the weights that a modelled machine's routing has, see trace.weights_of.
    text: its tokens are computed (ours); "": drawn ones, the same in every arm.
    prompts: their lengths.  n_batch: their tokens per pass.
    kept: .npz for the logits of the decoded tokens and their targets, the tokens that follow.
    depth: tokens of context before decoding.  flash_attn: on or off; "": llama.cpp chooses.
    n_tokens, seconds: decoding ends with whichever comes first; so does its warm-up, of n_warm_up tokens.
    device: of ggml's, that has all layers; None leaves them where llama.cpp puts them.  rpc: server that
    offers it, HOST:PORT.  n_cpu_moe: the experts of the first so many layers stay with the CPU, as by
    llama.cpp's option of that name (stock).
    """

    model: str
    lib_dir: str | None = None
    spread: float = 0.0
    settings: dict[str, Setting] = field(default_factory=dict)
    mmap: bool = False
    repack: bool = False
    n_threads: int = 1
    text: str = ""
    prompts: tuple[int, ...] = (16, 128, 512)
    n_batch: int = 512
    kept: str = ""
    depth: int = 0
    flash_attn: str = ""
    n_warm_up: int = 32
    n_tokens: int = 64
    seconds: float = 60.0
    device: str | None = None
    rpc: str | None = None
    n_cpu_moe: int = 0


class Libraries:
    """One build of llama.cpp; native is None where it has no expert cache."""

    def __init__(self, lib_dir: str | None) -> None:
        if lib_dir is None:
            from pyhobbit.native import ffi
            from pyhobbit.native.paths import LIB_DIR

            self.llama: Any = ffi.llama.llama_cpp
            self.native: Any = ffi
            self.folder = LIB_DIR
            return
        if "llama_cpp" in sys.modules:
            raise HobbitError(f"another llama.cpp than that of {lib_dir} is loaded: the arm would measure it")
        os.environ["LLAMA_CPP_LIB_PATH"] = lib_dir
        self.native, self.folder = None, Path(lib_dir)
        if (self.folder / "ik_llama_cpp").exists():
            self.llama = IkLlama(self.folder)
            return
        import llama_cpp.llama_cpp

        self.llama = llama_cpp.llama_cpp
        know_newer_fields(self.llama, self.folder)


def know_newer_fields(llama: Any, lib_dir: Path) -> None:
    """Adds the field of llama_context_params that llama-cpp-python 0.3.36 does not know: moe_cache_size.

    llama: the module llama_cpp.llama_cpp with the libraries of lib_dir. Others than b11549 lack the field.
    """
    ggml = ctypes.CDLL(str(lib_dir / "libggml-base.so"))
    if not hasattr(ggml, "ggml_backend_sched_set_copy_callback"):
        return
    fields = list(llama.llama_context_params._fields_)
    after = [name for name, _ in fields].index("type_v") + 1
    fields.insert(after, ("moe_cache_size", ctypes.c_size_t))
    newer = type("llama_context_params", (ctypes.Structure,), {"_fields_": fields})
    llama.llama_context_default_params.restype = newer
    llama.llama_init_from_model.argtypes = [llama.llama_model_p_ctypes, newer]


class GgmlDevice:
    """Holds nothing but the process's own libraries."""

    def __init__(self, lib_dir: Path, name: str, rpc: str | None = None) -> None:
        """rpc: server whose devices are added first, HOST:PORT. Raises HobbitError."""
        if rpc is not None:
            add_rpc_servers(rpc, lib_dir)
        self.ggml = ggml = Ggml(lib_dir)
        devices = {ggml.text("name", device): device for device in ggml.devices()}
        if name not in devices:
            there_are = ", ".join(devices)
            raise HobbitError(f"llama.cpp in {lib_dir} has no device '{name}': choose one of {there_are}")
        self.pointer = devices[name]
        if ggml("backend_buft_is_host", "bp", ggml("backend_dev_buffer_type", "pp", self.pointer)):
            raise HobbitError(f"the device '{name}' computes in host memory; name one with memory of its own")

    def describe(self) -> dict[str, Any]:
        """The device as the first line of a run tells it."""
        what = {name: self.ggml.text(name, self.pointer) for name in ("name", "description")}
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.ggml("backend_dev_memory", "vppp", self.pointer, ctypes.byref(free), ctypes.byref(total))
        return {**what, "total_bytes": total.value}


class Session:
    """The model and one sequence of the job's tokens."""

    def __init__(self, libraries: Libraries, job: Job, n_ctx: int) -> None:
        self.llama, self._native, self._job, self._n_ctx = libraries.llama, libraries.native, job, n_ctx
        self.llama.llama_backend_init()
        self.device = GgmlDevice(libraries.folder, job.device, job.rpc) if job.device else None
        self.model = self._load(libraries.folder)
        self.cache, self.tokens = None, list[int]()
        if self._native is not None:
            from pyhobbit.engine.llama import LoadedModel  # with our libraries

            loaded = LoadedModel(Path(job.model), self.model)
            self.cache = loaded.cache
            self.tokens = loaded.tokenize(job.text) if job.text else []
        self._open()
        self.n_vocab = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(self.model))
        self._draw = iter(self.tokens or random_tokens(self.n_vocab))  # all arms have the same

    def _load(self, folder: Path) -> Any:
        job, params = self._job, self.llama.llama_model_default_params()
        # without no_host a device's page-locked memory comes before the repacked layouts
        params.use_extra_bufts = params.no_host = job.repack
        if self.device:
            self._devices = (ctypes.c_void_p * 2)(self.device.pointer)  # NULL ends it
            self._on_cpu = experts_on_cpu(job.n_cpu_moe, folder)
            params.devices = ctypes.addressof(self._devices)
            params.tensor_buft_overrides = ctypes.addressof(self._on_cpu)
        if job.lib_dir is not None:
            mode = "LLAMA_LOAD_MODE_MMAP" if job.mmap else "LLAMA_LOAD_MODE_NONE"
            params.load_mode = getattr(self.llama, mode)
        params.kv_overrides = self._overrides = kv_overrides(self.llama, job.settings)
        model = self.llama.llama_model_load_from_file(os.fsencode(job.model), params)
        if not model:
            raise self._failure(f"llama.cpp cannot load {job.model}")
        return model

    def _open(self) -> None:
        params, job = self.llama.llama_context_default_params(), self._job
        params.n_ctx = self._n_ctx
        params.n_batch = params.n_ubatch = min(job.n_batch, self._n_ctx)
        params.n_outputs_max = params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = job.n_threads
        if job.flash_attn:
            mode = "ENABLED" if job.flash_attn == "on" else "DISABLED"
            params.flash_attn_type = getattr(self.llama, f"LLAMA_FLASH_ATTN_TYPE_{mode}")
        self.n_batch, self.n_ctx = params.n_batch, params.n_ctx
        self.context = self.llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise self._failure(f"llama.cpp cannot make a context for {job.model}")
        self.restart()

    def _failure(self, what: str) -> HobbitError:
        reason = self._native.last_error() if self._native is not None else None
        return HobbitError(f"{what}: {reason}" if reason else what)

    def await_filled(self) -> None:
        """Waits until the pools get no more experts."""
        before = -1
        while self.cache and (n_read := self.cache.stats().bytes_read) != before:
            before = n_read
            time.sleep(_FILLING_S)

    def restart(self) -> None:
        """Empties the KV cache."""
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)
        self._n_past = 0

    def append(self, n_tokens: int) -> float:
        """Computes n_tokens more, in a new sequence if this one is full; returns the seconds."""
        if self._n_past + n_tokens > self.n_ctx:
            self.restart()
        tokens = list(islice(self._draw, n_tokens))
        if len(tokens) < n_tokens:
            raise HobbitError(f"the text has {len(self.tokens)} tokens only; give a longer one")
        start = time.perf_counter()
        for first in range(0, n_tokens, self.n_batch):
            self._decode(tokens[first : first + self.n_batch])
        self.llama.llama_synchronize(self.context)
        return time.perf_counter() - start

    def _decode(self, tokens: list[int]) -> None:
        array = (self.llama.llama_token * len(tokens))(*tokens)
        status = self.llama.llama_decode(self.context, self.llama.llama_batch_get_one(array, len(tokens)))
        if status:
            raise self._failure(f"llama_decode failed with status {status}")
        self._n_past += len(tokens)

    def logits(self) -> np.ndarray:
        """The last token's, [n_vocab]. Raises HobbitError where the activations have run away."""
        values = np.ctypeslib.as_array(self.llama.llama_get_logits(self.context), (self.n_vocab,))
        if not np.isfinite(values).all():
            raise HobbitError("the logits are not finite: use another model")
        return values.copy()

    def counters(self) -> CacheStats | None:
        """The cache's; None for a model without a cache."""
        return self.cache.stats() if self.cache else None

    def close(self) -> None:
        if self.cache:
            self.cache.close()
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)


def counted(session: Session, before: CacheStats | None, seconds: float, n_tokens: int) -> dict[str, Any]:
    """Counters since `before`, and rates of the cache if there is one."""
    if before is None or session.cache is None:
        return {"counters": {}, "info": {}}
    counters = asdict(session.cache.stats().since(before))
    found = {**asdict(rates({}, counters, seconds, 0)), "counters": counters, "info": session.cache.info()}
    if session.device:
        n_layers, n_bytes = max(1, counters["layers_computed"]), counters["bytes_transferred"]
        names = ("launches", "waits", "reads", "copies")
        found["per_layer"] = {name: counters[f"device_{name}"] / n_layers for name in names}
        found["moved_bytes_per_token"] = n_bytes / n_tokens
        found["moved_bytes_per_second"] = n_bytes / counters["transfer_s"] if n_bytes else None
    return found


def decode(
    session: Session, n_tokens: int, seconds: float, kept: list[np.ndarray] | None = None
) -> list[float]:
    """Seconds of each token; at least one token. kept: gets their logits."""
    times: list[float] = []
    while len(times) < n_tokens and (not times or sum(times) < seconds):
        times.append(session.append(1))
        if kept is not None:
            kept.append(session.logits())
    return times


def measure(job: Job) -> dict[str, Any]:
    """Loads the model and measures: figures as bench/README.md explains them. Raises HobbitError."""
    if not job.model:
        assert job.device is not None
        return GgmlDevice(Libraries(job.lib_dir).folder, job.device, job.rpc).describe()
    longest = max(job.prompts)
    n_ctx = job.depth + min(_MAX_CONTEXT, longest + job.n_warm_up + job.n_tokens)
    libraries = Libraries(job.lib_dir)
    start = time.perf_counter()
    session = Session(libraries, job, max(longest, n_ctx))
    load_s = time.perf_counter() - start
    if job.settings.get("hobbit.calibrated"):
        session.await_filled()
    ttft_s, ttft_bytes, crcs = {}, {}, []
    for n_tokens in sorted(job.prompts):
        session.restart()
        n_read = bytes_from_disk()
        ttft_s[str(n_tokens)] = session.append(n_tokens)
        ttft_bytes[str(n_tokens)] = bytes_from_disk() - n_read
        crcs.append(zlib.crc32(session.logits().tobytes()))
    if job.depth:
        session.restart()
        session.append(job.depth)
    decode(session, job.n_warm_up, job.seconds / 2)
    before, n_read = session.counters(), bytes_from_disk()
    kept: list[np.ndarray] | None = [] if job.kept else None
    times = decode(session, job.n_tokens, job.seconds, kept)
    result = {
        "load_s": load_s,
        "ttft_s": ttft_s,
        "ttft_bytes": ttft_bytes,
        "n_decoded": len(times),
        "tokens_per_second": len(times) / sum(times),
        "disk_bytes_per_token": (bytes_from_disk() - n_read) / len(times),
        "peak_rss_bytes": peak_rss_bytes(),
        "logits_crc": crcs[0],
        **counted(session, before, sum(times), len(times)),
    }
    if kept is not None:
        done = sum(job.prompts) + job.n_warm_up
        np.savez(job.kept, logits=kept, targets=session.tokens[done + 1 :][: len(kept)])
    session.close()
    return result


def serve(measure: Callable[[Job], Mapping[str, Any]]) -> int:
    """The command of a measuring process. Raises HobbitError where the arm cannot be measured."""
    job = Job(**json.load(sys.stdin))
    os.chdir(Path(job.model).parent)  # settings carry short paths only
    json.dump(measure(job), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(ended(lambda: serve(measure)))
