# SPDX-License-Identifier: MIT
"""The speed of products of weights, beside that of reading memory.

    python -m bench.kernels --types q4_0 q4_K --tokens 1 8 32 512 --threads 2

Prints GB of weights a second, the best of --reps. CPU has the weights that llama.cpp does not repack. With
--cpu-time they are GB a second of processor time, which other programs distort less.
"""

import ctypes
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench.harness.system import option_parser
from pyhobbit.model.quantize import GgmlType, quantize, type_by_name
from pyhobbit.native.paths import LIB_DIR

_P, _I, _N = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_N_IN, _F32 = 2048, 0


class _Parameters(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("memory", _P), ("no_alloc", ctypes.c_bool)]


_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_P, (_Parameters,)),
    "ggml_free": (None, (_P,)),
    "ggml_new_tensor_2d": (_P, (_P, _I, _N, _N)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_new_graph": (_P, (_P,)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_tensor_set": (None, (_P, _P, ctypes.c_size_t, ctypes.c_size_t)),
    "ggml_backend_dev_by_type": (_P, (_I,)),
    "ggml_backend_dev_backend_reg": (_P, (_P,)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, ctypes.c_char_p)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (_P, _P)),
    "ggml_backend_dev_init": (_P, (_P, _P)),
    "ggml_backend_graph_compute": (_I, (_P, _P)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (_P,)),
    "ggml_backend_cpu_buffer_type": (_P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_P, _I)),
}


class Ggml:
    """The functions of libggml that a product takes."""

    def __init__(self) -> None:
        libraries = [ctypes.CDLL(str(LIB_DIR / f"libggml{part}.so")) for part in ("", "-base", "-cpu")]
        for name, (result, arguments) in _PROTOTYPES.items():
            function = next(library[name] for library in libraries if hasattr(library, name))
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_").removeprefix("backend_"), function)
        self.device = self.dev_by_type(0)
        address = self.reg_get_proc_address(
            self.dev_backend_reg(self.device), b"ggml_backend_dev_get_extra_bufts"
        )
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(self.device)
        types = [self.cpu_buffer_type()]
        while extra[len(types) - 1]:
            types.append(extra[len(types) - 1])
        self.buffer_types = {self.buft_name(buft).decode(): buft for buft in types}

    def __getattr__(self, name: str) -> Any:  # for the type checker
        raise AttributeError(name)

    def seconds(self, buft: int, kind: GgmlType, n_out: int, n_tokens: int, args: Namespace) -> float:
        """The least time of a product of n_out rows and n_tokens of activations; inf: none."""
        contexts = [self.init(_Parameters(1 << 22, None, True)) for _ in range(2)]
        weights = self.new_tensor_2d(contexts[0], kind.id, _N_IN, n_out)
        x = self.new_tensor_2d(contexts[1], _F32, _N_IN, n_tokens)
        product = self.mul_mat(contexts[1], weights, x)
        buffers = [
            self.alloc_ctx_tensors_from_buft(context, of)
            for context, of in zip(contexts, (buft, self.cpu_buffer_type()), strict=True)
        ]
        random = np.random.default_rng(1)
        rows = quantize(kind, random.standard_normal((16, _N_IN), np.float32), np.ones(_N_IN, np.float32))
        for tensor, data in (
            (weights, np.tile(np.ascontiguousarray(rows).view(np.uint8).ravel(), n_out // 16)),
            (x, random.standard_normal((n_tokens, _N_IN), np.float32)),
        ):
            if not self.dev_supports_op(self.device, product):
                return math.inf
            self.tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
        graph = self.new_graph(contexts[1])
        self.build_forward_expand(graph, product)
        backend = self.dev_init(self.device, None)
        self.cpu_set_n_threads(backend, args.threads)
        times = [_timed(lambda: self.graph_compute(backend, graph), args) for _ in range(args.reps + 1)]
        for buffer, context in zip(buffers, contexts, strict=True):
            self.buffer_free(buffer)
            self.free(context)
        return min(times[1:])


def _timed(call: Callable[[], Any], args: Namespace) -> float:
    clock = time.process_time if args.cpu_time else time.perf_counter
    start = clock()
    call()
    return clock() - start


def _probe(args: Namespace) -> float:
    """GB a second that as many threads read."""
    blocks = [np.ones(args.mb << 17) for _ in range(args.threads)]
    with ThreadPoolExecutor(args.threads) as pool:
        times = [_timed(lambda: list(pool.map(np.sum, blocks)), args) for _ in range(args.reps)]
    return sum(block.nbytes for block in blocks) / min(times) / 1e9


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--types", nargs="+", required=True)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mb", type=int, default=256, help="size of the weights")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    ggml = Ggml()
    print(f"{'':8} {'buffer type':16}" + "".join(f"{n:>6} tokens" for n in args.tokens))
    for kind in map(type_by_name, args.types):
        n_out = (args.mb << 20) // kind.nbytes(_N_IN) // 16 * 16
        for name, buft in ggml.buffer_types.items():
            speeds = [
                kind.nbytes(_N_IN) * n_out / ggml.seconds(buft, kind, n_out, n, args) / 1e9
                for n in args.tokens
            ]
            if all(speeds):
                print(f"{kind.name:8} {name:16}" + "".join(f"{speed:13.2f}" for speed in speeds), flush=True)
    print(f"reading alone: {_probe(args):.1f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
