# SPDX-License-Identifier: MIT
"""The speed of products of weights, beside that of reading memory.

    python -m bench.kernels --types q4_0 q4_K --tokens 1 8 32 512 --threads 2

Prints GB of weights a second, the best of --reps; cached: of one token, from the second-level cache. CPU has
what llama.cpp does not repack.
"""

import ctypes
import sys
import timeit
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import numpy as np

from bench.harness.system import option_parser
from pyhobbit.model.quantize import GgmlType, quantize, type_by_name
from pyhobbit.native.devices import Ggml

_POINTER = ctypes.c_void_p
_N_IN, _F32 = 2048, 0
_CACHED = 512 << 10  # bytes of a thread's part in the second-level cache


class _Parameters(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("memory", _POINTER), ("no_alloc", ctypes.c_bool)]


class Products(Ggml):
    """Times products in each buffer type of the CPU."""

    _TYPES = MappingProxyType({**Ggml._TYPES, "S": _Parameters})

    def __init__(self) -> None:
        super().__init__()
        self.device = self("backend_dev_by_type", "pi", 0)
        registry = self("backend_dev_backend_reg", "pp", self.device)
        address = self("backend_reg_get_proc_address", "pps", registry, b"ggml_backend_dev_get_extra_bufts")
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(_POINTER), _POINTER)(address)(self.device)
        types = [self("backend_cpu_buffer_type", "p")]
        while extra[len(types) - 1]:
            types.append(extra[len(types) - 1])
        self.buffer_types = {self("backend_buft_name", "sp", buft).decode(): buft for buft in types}

    def speed(self, buft: int, kind: GgmlType, n_bytes: int, n_tokens: int, args: Namespace) -> float:
        """The most GB a second of products of these bytes of weights and n_tokens of activations; 0: none."""
        n_out = n_bytes // kind.nbytes(_N_IN) // 16 * 16
        n_times = max(1, (args.mb << 20) // n_bytes)
        contexts = [self("init", "pS", _Parameters(1 << 22, None, True)) for _ in range(2)]
        weights = self("new_tensor_2d", "ppinn", contexts[0], kind.id, _N_IN, n_out)
        x = self("new_tensor_2d", "ppinn", contexts[1], _F32, _N_IN, n_tokens)
        products = [self("mul_mat", "pppp", contexts[1], weights, x) for _ in range(n_times)]
        places = zip(contexts, (buft, self.buffer_types["CPU"]), strict=True)
        buffers = [self("backend_alloc_ctx_tensors_from_buft", "ppp", *place) for place in places]
        random = np.random.default_rng(1)
        rows = quantize(kind, random.standard_normal((16, _N_IN), np.float32), np.ones(_N_IN, np.float32))
        if not self("backend_dev_supports_op", "bpp", self.device, products[0]):
            return 0.0
        for tensor, data in (
            (weights, np.tile(np.ascontiguousarray(rows).view(np.uint8).ravel(), n_out // 16)),
            (x, random.standard_normal((n_tokens, _N_IN), np.float32)),
        ):
            self("backend_tensor_set", "vppzz", tensor, data.ctypes.data, 0, data.nbytes)
        graph = self("new_graph", "pp", contexts[1])
        for product in products:
            self("build_forward_expand", "vpp", graph, product)
        backend = self("backend_dev_init", "ppp", self.device, None)
        self("backend_cpu_set_n_threads", "vpi", backend, args.threads)
        compute = self.function("backend_graph_compute", "ipp")
        times = timeit.repeat(lambda: compute(backend, graph), number=1, repeat=args.reps + 1)
        for buffer, context in zip(buffers, contexts, strict=True):
            self("backend_buffer_free", "vp", buffer)
            self("free", "vp", context)
        return n_times * kind.nbytes(_N_IN) * n_out / min(times[1:]) / 1e9


def _probe(args: Namespace) -> float:
    """GB a second that as many threads read."""
    blocks = [np.ones(args.mb << 17) for _ in range(args.threads)]
    with ThreadPoolExecutor(args.threads) as pool:
        times = timeit.repeat(lambda: list(pool.map(np.sum, blocks)), number=1, repeat=args.reps)
    return sum(block.nbytes for block in blocks) / min(times) / 1e9


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--types", nargs="+", required=True)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mb", type=int, default=256, help="size of the weights")
    parser.add_argument("--reps", type=int, default=7)
    args = parser.parse_args()
    ggml = Products()
    print(f"{'':8} {'buffer type':16}{'cached':>13}" + "".join(f"{n:>6} tokens" for n in args.tokens))
    sizes = [(args.threads * _CACHED, 1), *((args.mb << 20, n) for n in args.tokens)]
    for kind in map(type_by_name, args.types):
        for name, buft in ggml.buffer_types.items():
            speeds = [ggml.speed(buft, kind, n_bytes, n, args) for n_bytes, n in sizes]
            if all(speeds):
                print(f"{kind.name:8} {name:16}" + "".join(f"{speed:13.2f}" for speed in speeds), flush=True)
    print(f"reading alone: {_probe(args):.1f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
