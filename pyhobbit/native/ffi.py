# SPDX-License-Identifier: MIT
"""The two doors to native code: hobbit's C interface through cffi, and llama.cpp through llama-cpp-python.

Both must end up in the same patched libraries, so llama_cpp is imported here and nowhere else.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pyhobbit.errors import ComputeError, HobbitError
from pyhobbit.native.environment import environment
from pyhobbit.native.hobbit_c import REINSTALL
from pyhobbit.native.hobbit_c import ffi as ffi
from pyhobbit.native.hobbit_c import lib as lib
from pyhobbit.native.paths import LIB_DIR

_ERR_SIZE = 4096


def _import_llama() -> ModuleType:
    if not (LIB_DIR / "libllama.so").exists():
        raise HobbitError(f"{LIB_DIR} holds no libllama.so; {REINSTALL}")
    with environment({"LLAMA_CPP_LIB_PATH": str(LIB_DIR)}):
        import llama_cpp
        import llama_cpp.llama_chat_format
    loaded = Path(llama_cpp.llama_cpp._lib._name)
    if loaded.parent.resolve() != LIB_DIR.resolve():
        raise HobbitError(
            f"llama_cpp was imported before pyhobbit, with {loaded}; import pyhobbit first, or set "
            f"LLAMA_CPP_LIB_PATH={LIB_DIR}"
        )
    return llama_cpp


llama: Any = _import_llama()


def _declared(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _wall(library: Any) -> Any:
    """The library, where C++ exceptions of functions that were named so far become ComputeErrors."""
    thrown = _declared(library.hobbit_thrown, ctypes.c_char_p)
    walled = _declared(library.hobbit_walled, ctypes.c_void_p, ctypes.c_char_p)

    def check(result: Any, function: Any, _arguments: object) -> Any:
        if (what := thrown()) is not None:
            text = what.decode("utf-8", "replace").replace("std::bad_alloc", "not enough memory")
            raise ComputeError(f"llama.cpp failed in {function.__name__}: {text}")
        return result

    for name, function in vars(library).items():
        if isinstance(function, library._FuncPtr) and function not in (thrown, walled):
            address = ctypes.c_void_p.from_buffer(function)
            address.value = walled(name.encode()) or address.value
            function.errcheck = check
    return library


_lib = llama.llama_cpp._lib
_expert_cache = _declared(_lib.llama_model_expert_cache, ctypes.c_void_p, ctypes.c_void_p)
_context = _declared(_lib.llama_expert_cache_context, ctypes.c_void_p, ctypes.c_void_p)
_lost_machine = _declared(_lib.llama_lost_machine, ctypes.c_char_p)
_plan_make = _declared(_lib.llama_hobbit_plan_make, ctypes.c_bool, *[ctypes.c_void_p] * 6, ctypes.c_size_t)
_wall(_lib)


def lost_machine() -> str | None:
    """A sentence on an RPC server that does not answer any more; None: there is none."""
    address = _lost_machine()
    if address is None:
        return None
    return (
        f"the machine at {address.decode()} does not answer any more; start 'pyhobbit worker' there, "
        "and open the model again"
    )


@cache
def chat_library() -> ctypes.CDLL:
    """libllama-common with the functions of hobbit-chat.cpp; takes 20 MiB, so only what may chat loads it."""
    library = ctypes.CDLL(str(LIB_DIR / "libllama-common.so"))
    text, pointer, flag = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_bool
    for name, result, *arguments in (
        ("new", pointer, pointer, text),
        ("free", None, pointer),
        ("render", text, pointer, text, flag),
        ("parse", text, pointer, text, flag),
    ):
        _declared(getattr(library, f"hobbit_chat_{name}"), result, *arguments)
    return _wall(library)


@cache
def multimodal() -> Any:
    """llama-cpp-python's bindings to libmtmd."""
    with environment({"MTMD_CPP_LIB": str(LIB_DIR)}):
        from llama_cpp import mtmd_cpp
    library, number = mtmd_cpp._libmtmd, ctypes.POINTER(ctypes.c_int32)
    _declared(library.hobbit_projector_bytes, ctypes.c_uint64, ctypes.c_char_p, number)
    _wall(library)
    return mtmd_cpp


def projector_sizes(path: bytes) -> tuple[int, int]:
    """Bytes in host memory and n_embd of a projector, by hobbit-projector.cpp; 0 bytes where it is none."""
    n_embd = ctypes.c_int32(0)
    return multimodal()._libmtmd.hobbit_projector_bytes(path, ctypes.byref(n_embd)), n_embd.value


def expert_cache(model: Any) -> Any:
    """The hobbit_model of a llama_model, with a new reference; NULL where it runs without an expert cache."""
    cache = ffi.cast("hobbit_model *", _expert_cache(model) or 0)
    if cache:
        lib.hobbit_ref(cache)
    return cache


def cache_context(context: Any) -> Any:
    """The hobbit_context of a llama_context, valid while that is; NULL without an expert cache."""
    return ffi.cast("hobbit_context *", _context(context) or 0)


def plan_of(
    model: Any, params: Any, contexts: Sequence[int], batches: Sequence[int], *how: float
) -> tuple[Any, str | None]:
    """struct llama_hobbit_plan, and why the model cannot be opened so; "": llama.cpp's log says it.

    params then have the choice. how: available, share, has_pools, has_head.
    """
    needs, err = ffi.new("struct llama_hobbit_plan *"), ffi.new("char[]", _ERR_SIZE)
    sizes = [(ffi.new("uint32_t[]", each), len(each)) for each in (contexts, batches)]
    choice = ffi.new("struct llama_hobbit_choice *", (how[0], *sizes[0], *sizes[1], *how[1:]))
    given = (int(ffi.cast("uintptr_t", each)) for each in (choice, needs, err))
    fits = _plan_make(model, _expert_cache(model), ctypes.byref(params), *given, _ERR_SIZE)
    return needs, None if fits else lost_machine() or ffi.string(err).decode("utf-8", "replace")


def check(call: Callable[..., bool], *args: Any) -> None:
    """Runs a function of hobbit.h that ends in (err, err_size); raises HobbitError with its sentence."""
    err = ffi.new("char[]", _ERR_SIZE)
    if not call(*args, err, _ERR_SIZE):
        raise HobbitError(ffi.string(err).decode("utf-8", "replace"))


def last_error() -> str | None:
    """The most recent error sentence of the native code, or None."""
    err = ffi.new("char[]", _ERR_SIZE)
    return ffi.string(err).decode("utf-8", "replace") if lib.hobbit_last_error(err, _ERR_SIZE) else None


def first_part(path: Path) -> Path:
    """The file that has the other parts of a split model beside it: see hobbit_first_part."""
    first = ffi.new("char[]", _ERR_SIZE)
    lib.hobbit_first_part(bytes(path), first, _ERR_SIZE)
    return Path(os.fsdecode(ffi.string(first)))
