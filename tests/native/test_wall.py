# SPDX-License-Identifier: MIT
"""C++ exceptions below the functions that Python calls: each becomes an error, and none ends the process."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from hobbits import run_script

from pyhobbit.native import ffi

# They are called while llama_cpp is imported.
AT_IMPORT = {"llama_max_devices", "llama_log_set"}

EACH = """
import ctypes, sys
from pyhobbit.errors import ComputeError
from pyhobbit.native import ffi
for library in (ffi._lib, ffi.chat_library(), ffi.multimodal()._libmtmd):
    for name, function in list(vars(library).items()):
        if isinstance(function, library._FuncPtr) and name in sys.argv[1].split(","):
            try:
                function(*[type() for type in function.argtypes or ()])
            except ComputeError as e:
                assert str(e).endswith(f": thrown by {name}"), e
                print(name)
"""


def _libraries() -> list[ctypes.CDLL]:
    return [ffi._lib, ffi.chat_library(), ffi.multimodal()._libmtmd]


def _bound(library: ctypes.CDLL) -> dict[str, object]:
    """Functions by name that Python may call; those of hobbit-wall.h cannot throw."""
    found = {name: each for name, each in vars(library).items() if isinstance(each, library._FuncPtr)}
    return {
        name: each for name, each in found.items() if not name.startswith(("hobbit_thrown", "hobbit_walled"))
    }


def _address(function: object) -> int | None:
    return ctypes.c_void_p.from_buffer(function).value  # type: ignore[arg-type]


def test_every_function_that_python_names_is_behind_the_wall() -> None:
    for library in _libraries():
        for name, function in _bound(library).items():
            assert _address(function) not in (None, _address(library[name])), name
            assert function.errcheck.__name__ == "check", name  # type: ignore[attr-defined]


def test_what_every_function_throws_is_an_error(tmp_path: Path) -> None:
    names = sorted({name for each in _libraries() for name in _bound(each)} - AT_IMPORT)
    assert len(names) > 300
    source, library = tmp_path / "throw.cpp", tmp_path / "throw.so"
    thrown = (
        f'extern "C" void {name}() {{ throw std::runtime_error("thrown by {name}"); }}' for name in names
    )
    source.write_text("#include <stdexcept>\n" + "\n".join(thrown) + "\n")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True, timeout=300)
    assert sorted(run_script(EACH, ",".join(names), LD_PRELOAD=str(library)).split()) == names
