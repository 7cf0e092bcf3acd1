# SPDX-License-Identifier: MIT
"""Logits of a model under a chosen build of llama.cpp, computed in a process of its own.

Two builds of libllama cannot live in one process, so tests call `run`, which starts this file with the wanted
library folder, hands it the plans as JSON, and reads the logits back from an .npz file. Everything that could
change the arithmetic is fixed, one ubatch per batch among it: two threads, no flash attention and no repacked
weights, unless the caller asks for others.

By hand, 20 greedy tokens after a prompt of three:

    python tests/logits.py --lib-dir build/stock/bin --model m.gguf --out out.npz \\
        --plans '{"a": {"batches": [[[1, 0, 0], [2, 1, 0], [3, 2, 0]]], "greedy": 20}}'
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import forked
import numpy as np

from bench.harness.worker import know_newer_fields
from pyhobbit.engine.beams import Fork, assign, search
from pyhobbit.settings.config import kv_overrides

ROOT = Path(__file__).resolve().parent.parent
# this Python, or a command that runs that of another machine
PYTHON = shlex.split(os.environ.get("LOGITS_PYTHON", shlex.quote(sys.executable)))
FORKED = forked.Program("logits:main", [*forked.FOR_LLAMA_CPP, "hobbit_header", "logits"], ROOT / "tests")
N_THREADS = int(os.environ.get("LOGITS_THREADS", "2"))
N_CTX = 1024
TIMEOUT_S = int(os.environ.get("LOGITS_TIMEOUT_S", "900"))
GPU_TIMEOUT_S = 1800  # a software device compiles every kernel when it is first used
GPU_ENVIRONMENT = {
    "GGML_VK_VISIBLE_DEVICES": "0",  # software devices are devices, too
    "GGML_CUDA_DISABLE_FUSION": "1",  # as the expert cache multiplies: one operation at a time
}
Override = bool | int | float | str
Batch = list[tuple[int, int, int]]  # (token, position, sequence)


@dataclass(frozen=True)
class Plan:
    """A fresh context's decoding: `batches`, then `greedy` tokens, one at a time, in sequence 0.

    With more `beams`, at most 8, so many continuations of sequence 0 side by side. ends: they may end before.
    """

    batches: list[Batch]
    greedy: int = 0
    beams: int = 1
    ends: bool = False


@dataclass(frozen=True)
class Result:
    """logits: float32 [tokens, vocabulary] by plan. texts: the beams' tokens by plan, the likeliest first.
    routing: int32 [layers, tokens, used] by plan, if asked.
    info, stats, devices: hobbit.h's structs by field; empty where llama.cpp loaded it as it always does.
    report: what modelled devices found.
    log: what the libraries wrote."""

    logits: dict[str, np.ndarray]
    texts: dict[str, list[list[int]]] = field(default_factory=dict)
    routing: dict[str, np.ndarray] = field(default_factory=dict)
    info: dict[str, float] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    log: str = ""


class RunError(RuntimeError):
    """The run ended with an error; the message is what it wrote to stderr."""


def one_at_a_time(tokens: list[int]) -> Plan:
    return Plan([[(token, i, 0)] for i, token in enumerate(tokens)])


def prefill(tokens: list[int], greedy: int = 0) -> Plan:
    return Plan([[(token, i, 0) for i, token in enumerate(tokens)]], greedy)


def run(
    lib_dir: Path,
    model: Path,
    plans: dict[str, Plan],
    overrides: dict[str, Override] | None = None,
    *,
    kv_f32: bool = False,
    routing: bool = False,
    repack: bool = False,
    flash: bool = False,
    n_threads: int = N_THREADS,
    gpu_layers: int = 0,
    rpc: str | None = None,
    gpu: bool = False,
    modelled: str | None = None,
    environment: dict[str, str] | None = None,
) -> Result:
    """Decodes every plan with the libllama.so in `lib_dir`. Raises RunError.

    `kv_f32` keeps keys and values in f32 instead of f16, `repack` weights in ggml's repacked layouts.
    `flash`: attention is flash attention.
    `gpu_layers` are on devices where there are any; those of the RPC servers at `rpc` are.
    With `gpu` see GPU_ENVIRONMENT, for `modelled` devices modelled.py.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npz"
        command = ["--lib-dir", lib_dir, "--model", model, "--out", out]
        command += ["--plans", json.dumps({name: asdict(plan) for name, plan in plans.items()})]
        command += ["--overrides", json.dumps(overrides or {})]
        command += ["--kv-f32"] * kv_f32 + ["--routing"] * routing + ["--repack"] * repack
        command += ["--flash"] * flash + ["--threads", str(n_threads)]
        command += ["--gpu-layers", str(gpu_layers)] + (["--rpc", rpc] if rpc else [])
        command += ["--modelled", modelled] if modelled else []
        timeout = GPU_TIMEOUT_S if gpu else TIMEOUT_S
        variables = os.environ | (GPU_ENVIRONMENT if gpu else {}) | (environment or {})
        if [sys.executable] == PYTHON:
            done = FORKED.run(command, timeout=timeout, env=variables)
        else:
            command = [*PYTHON, __file__, *command]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, check=False, env=variables
            )
        if done.returncode:
            raise RunError(f"{model.name}, {lib_dir}, exit {done.returncode}: {done.stderr[-4000:]}")
        with np.load(out) as arrays:
            kinds: dict[str, dict[str, Any]] = {
                name: {} for name in ("logits", "texts", "routing", "info", "stats", "report")
            }
            devices: dict[str, dict[str, Any]] = {}
            for key in arrays.files:
                kind, name = key.rsplit("/", 1)
                fields = kinds[kind] if kind in kinds else devices.setdefault(kind, {})
                fields[name] = arrays[key] if arrays[key].ndim else arrays[key].item()
            kinds["texts"] = {name: json.loads(text) for name, text in kinds["texts"].items()}
            kinds["report"] = json.loads(kinds["report"].get("json", "{}"))
        return Result(**kinds, devices=list(devices.values()), log=done.stderr)


class RoutingRecorder:
    """Collects the experts that each layer chose, through the scheduler's evaluation callback."""

    def __init__(self, llama: Any, lib_dir: Path) -> None:
        self.chosen: dict[int, list[np.ndarray]] = {}
        self.callback = llama.ggml_backend_sched_eval_callback(self._evaluated)
        self._base = ctypes.CDLL(str(lib_dir / "libggml-base.so"))
        self._base.ggml_get_name.restype = ctypes.c_char_p
        self._base.ggml_nbytes.restype = ctypes.c_size_t
        for function in (self._base.ggml_get_name, self._base.ggml_nbytes):
            function.argtypes = [ctypes.c_void_p]
        self._base.ggml_backend_tensor_get.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t,
        ]  # fmt: skip

    def _evaluated(self, tensor: int, ask: bool, _user_data: int) -> bool:
        name = self._base.ggml_get_name(tensor).decode()
        if not name.startswith("ffn_moe_topk-"):
            return not ask
        if not ask:
            # A view of the first columns of a sort: one row of it is contiguous only for one token.
            ids = np.empty(self._base.ggml_nbytes(tensor) // 4, np.int32)
            self._base.ggml_backend_tensor_get(tensor, ids.ctypes.data, 0, ids.nbytes)
            self.chosen.setdefault(int(name.rpartition("-")[2]), []).append(ids)
        return True

    def take(self) -> np.ndarray:
        """int32 [layers, tokens, used] since the last call; valid for plans of one token per batch."""
        taken = np.stack([np.stack(rows) for _, rows in sorted(self.chosen.items())])
        self.chosen.clear()
        return taken


class Session:
    """One loaded model; each plan gets a context of its own."""

    def __init__(
        self,
        lib_dir: Path,
        path: Path,
        overrides: dict[str, Override],
        *,
        kv_f32: bool,
        routing: bool,
        repack: bool,
        flash: bool,
        n_threads: int,
        gpu_layers: int,
        rpc: str | None,
        modelled: str | None,
    ) -> None:
        os.environ["LLAMA_CPP_LIB_PATH"] = str(lib_dir)
        import llama_cpp.llama_cpp as llama

        self.llama = llama
        know_newer_fields(llama, lib_dir)
        self.kv_f32, self.flash, self.n_threads = kv_f32, flash, n_threads
        self.recorder = RoutingRecorder(llama, lib_dir) if routing else None
        llama.llama_backend_init()
        if not (
            lib_dir / "libggml-cpu.so"
        ).exists():  # one for each kind of processor, which stock does not find
            ctypes.CDLL(str(lib_dir / "libggml.so")).ggml_backend_load_all_from_path(os.fsencode(lib_dir))
        if rpc:
            _add_devices(lib_dir, rpc)
        self.modelled = _add_modelled(lib_dir, modelled) if modelled else None
        params = llama.llama_model_default_params()
        params.use_extra_bufts = repack
        params.n_gpu_layers = gpu_layers
        self._overrides = kv_overrides(llama, overrides)
        params.kv_overrides = self._overrides
        self.model = llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise RunError(f"the model could not be loaded: {path}")
        self.texts: list[list[int]] = []  # texts of the last plan with beams
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))

    def _context(self) -> Any:
        llama = self.llama
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = N_CTX
        params.n_seq_max = 8
        params.kv_unified = True
        params.swa_full = True
        params.n_threads = params.n_threads_batch = self.n_threads
        flash = "ENABLED" if self.flash else "DISABLED"
        params.flash_attn_type = getattr(llama, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
        if self.kv_f32:
            params.type_k = params.type_v = llama.GGML_TYPE_F32
        if self.recorder:
            params.cb_eval = self.recorder.callback
        context = llama.llama_init_from_model(self.model, params)
        if not context:
            raise RunError("the context could not be created")
        return context

    def _decode(self, context: Any, tokens: Batch) -> np.ndarray:
        llama = self.llama
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = llama.llama_decode(context, batch)
        llama.llama_batch_free(batch)
        if status:
            raise RunError(f"llama_decode failed with status {status}")
        values = llama.llama_get_logits(context)
        return np.ctypeslib.as_array(values, shape=(len(tokens), self.n_vocab)).copy()

    def decode(self, plan: Plan) -> np.ndarray:
        """float32 [tokens, vocabulary]"""
        context = self._context()
        try:
            logits = [self._decode(context, batch) for batch in plan.batches]
            position = plan.batches[-1][-1][1]
            logits += self._search(context, logits[-1][-1:], position, plan)
        finally:
            self.llama.llama_free(context)
        return np.concatenate(logits)

    def _search(self, context: Any, last: np.ndarray, position: int, plan: Plan) -> list[np.ndarray]:
        """The logits of each step, float32 [beams, vocabulary]. last: [1, vocabulary]"""
        steps: list[np.ndarray] = []
        places = [0]

        def extend(fork: Fork) -> np.ndarray:
            nonlocal places
            places, copies = assign([parent for parent, _ in fork], places, plan.beams)
            for source, target in copies:
                self._copy(context, source, target)
            at = position + 1 + len(steps)
            steps.append(self._decode(context, [(t, at, s) for (_, t), s in zip(fork, places, strict=True)]))
            return steps[-1]

        if plan.greedy:
            found = search(
                last, extend, self._ends if plan.ends else lambda _: False, plan.beams, plan.greedy + 1
            )
            self.texts = [list(each.tokens) for each in found]
        return steps

    def _ends(self, token: int) -> bool:
        return self.llama.llama_vocab_is_eog(self.llama.llama_model_get_vocab(self.model), token)

    def _copy(self, context: Any, source: int, target: int) -> None:
        memory = self.llama.llama_get_memory(context)
        self.llama.llama_memory_seq_rm(memory, target, -1, -1)
        self.llama.llama_memory_seq_cp(memory, source, target, -1, -1)

    def close(self) -> None:
        self.llama.llama_model_free(self.model)


def _add_devices(lib_dir: Path, endpoints: str) -> None:
    rpc = ctypes.CDLL(str(lib_dir / "libggml-rpc.so"))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    ggml = ctypes.CDLL(str(lib_dir / "libggml.so"))
    for endpoint in endpoints.split(","):
        ggml.ggml_backend_register(ctypes.c_void_p(rpc.ggml_backend_rpc_add_server(endpoint.encode())))


def _add_modelled(lib_dir: Path, text: str) -> ctypes.CDLL:
    """The preloaded library of the devices: "PATH name=value ...", see modelled_configure."""
    path, _, settings = text.partition(" ")
    for name in ("ggml-base", "ggml"):  # where the library finds their functions
        ggml = ctypes.CDLL(str(lib_dir / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    device = ctypes.CDLL(path)
    device.modelled_report.restype = ctypes.c_char_p
    device.ggml_backend_init.restype = ctypes.c_void_p
    device.modelled_configure(settings.encode())
    ggml.ggml_backend_register(ctypes.c_void_p(device.ggml_backend_init()))
    return device


def hobbit_structs(lib_dir: Path, session: Any) -> Iterator[tuple[str, Any]]:
    """info/FIELD, stats/FIELD and devices/NUMBER/FIELD of a model with an expert cache."""
    from hobbit_header import ffi  # needs cffi, and stock does not

    lib = ffi.dlopen(str(lib_dir / "libggml-hobbit.so"))
    find = session.llama._lib.llama_model_expert_cache
    find.argtypes, find.restype = [ctypes.c_void_p], ctypes.c_void_p
    model = ffi.cast("hobbit_model *", find(session.model) or 0)
    if model == ffi.NULL:
        return
    info = ffi.new("struct hobbit_info *")
    lib.hobbit_get_info(model, info)
    for name, _ in ffi.typeof("struct hobbit_info").fields:
        value = getattr(info, name)
        yield f"info/{name}", ffi.string(value).decode() if name == "precision" else value
    counters = list(takewhile(bool, map(lib.hobbit_counter_at, count())))
    values = ffi.new("double[]", len(counters))
    lib.hobbit_get_counters(model, values, len(counters))
    for counter, value in zip(counters, values, strict=True):
        yield f"stats/{ffi.string(counter.name).decode()}", value
    device, n_devices = ffi.new("struct hobbit_device_info *"), 0
    while lib.hobbit_get_device(model, n_devices, device):
        for name, _ in ffi.typeof("struct hobbit_device_info").fields:
            value = getattr(device, name)
            yield f"devices/{n_devices}/{name}", ffi.string(value).decode() if name == "name" else value
        n_devices += 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compute a model's logits with a chosen build of llama.cpp.")
    parser.add_argument("--lib-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--plans", type=json.loads, required=True)
    parser.add_argument("--overrides", type=json.loads, default={})
    parser.add_argument("--kv-f32", action="store_true", help="keys and values in f32 instead of f16")
    parser.add_argument("--routing", action="store_true", help="also record the chosen experts")
    parser.add_argument("--repack", action="store_true", help="weights in ggml's repacked layouts")
    parser.add_argument("--flash", action="store_true", help="flash attention")
    parser.add_argument("--threads", type=int, default=N_THREADS)
    parser.add_argument("--gpu-layers", type=int, default=0, help="on the devices that are not the CPU")
    parser.add_argument("--rpc", metavar="HOST:PORT,...", help="servers of further devices")
    parser.add_argument("--modelled", metavar="'PATH NAME=VALUE ...'", help="modelled devices")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    patched = (args.lib_dir / "libggml-hobbit.so").exists()
    arrays: dict[str, Any] = {}
    try:
        flags = {"kv_f32": args.kv_f32, "routing": args.routing, "repack": args.repack}
        flags |= {"flash": args.flash, "n_threads": args.threads}
        devices = {"gpu_layers": args.gpu_layers, "rpc": args.rpc, "modelled": args.modelled}
        session = Session(args.lib_dir, args.model, args.overrides, **flags, **devices)
        for name, plan in args.plans.items():
            arrays[f"logits/{name}"] = session.decode(Plan(**plan))
            arrays[f"texts/{name}"] = np.array(json.dumps(session.texts))
            if session.recorder:
                arrays[f"routing/{name}"] = session.recorder.take()
        if patched:
            arrays.update(hobbit_structs(args.lib_dir, session))
        session.close()
        if session.modelled:
            arrays["report/json"] = np.array(session.modelled.modelled_report().decode())
    except RunError as error:
        print(f"logits: {error}", file=sys.stderr)
        return 1
    np.savez(args.out, **arrays)
    return 0


if __name__ == "__main__":
    sys.exit(main())
