# SPDX-License-Identifier: MIT
import ctypes
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from itertools import count, takewhile
from pathlib import Path

import pytest

from pyhobbit._tables import COUNTERS, SETTINGS, CacheInfo, DeviceInfo
from pyhobbit.engine.stats import CacheStats
from pyhobbit.errors import HobbitError
from pyhobbit.native import build, ffi
from pyhobbit.native.paths import BIN_DIR, LIB_DIR, VENDOR_DIR

HEADERS = Path(__file__).resolve().parents[2] / "ggml_ext" / "include"


def _struct_fields(name: str) -> list[str]:
    return [field for field, _ in ffi.ffi.typeof(f"struct {name}").fields]


def test_every_function_of_the_headers_is_bound() -> None:
    text = "".join(each.read_text() for each in HEADERS.glob("*.h"))
    declared = set(re.findall(r"^HOBBIT_API .*?\b(hobbit_\w+)\(", text, flags=re.MULTILINE))
    assert len(declared) > 10
    assert {name for name in dir(ffi.lib) if name.startswith("hobbit_")} == declared


def test_declarations_drop_what_is_not_plain_c() -> None:
    lines = ["#ifdef X", "#define A \\", "  b", "#endif", "#ifdef __cplusplus", "extern {", "#endif"]
    header = "\n".join([*lines, "HOBBIT_API int f(void);", ""])
    assert build.declarations(header).split() == ["int", "f(void);"]


def test_settings_counters_and_information_are_those_of_the_library() -> None:
    counters = takewhile(bool, map(ffi.lib.hobbit_counter_at, count()))
    names = [ffi.ffi.string(each.name).decode() for each in counters]
    specs = takewhile(bool, map(ffi.lib.hobbit_setting_spec_at, count()))
    assert [ffi.ffi.string(each.key).decode() for each in specs] == [each.key for each in SETTINGS]
    assert names == [field.name for field in fields(CacheStats)] == [each.name for each in COUNTERS]
    assert _struct_fields("hobbit_device_info") == [field.name for field in fields(DeviceInfo)]
    assert _struct_fields("hobbit_info") == [field.name for field in fields(CacheInfo)]


def test_the_installed_package_has_its_libraries_programs_and_converter() -> None:
    for name in ("libllama.so", "libggml-base.so", "libggml-hobbit.so"):
        assert (LIB_DIR / name).exists(), f"{LIB_DIR} holds no {name}"
    for name in ("llama-server", "llama-quantize", "llama-perplexity", "llama-bench"):
        assert os.access(BIN_DIR / name, os.X_OK), f"{BIN_DIR} holds no {name}"
    assert (VENDOR_DIR / "convert_hf_to_gguf.py").exists()


def test_llama_cpp_and_hobbit_share_one_library() -> None:
    loaded = Path(ffi.llama.llama_cpp._lib._name).resolve().parent
    assert loaded == LIB_DIR.resolve()
    mapped = {
        Path(line.split()[-1])
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libggml-hobbit" in line
    }
    assert len(mapped) == 1
    assert mapped.pop().parent == LIB_DIR.resolve()


def test_a_failing_call_raises_its_sentence_and_keeps_it(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    model = ffi.ffi.new("hobbit_model **")
    with pytest.raises(HobbitError, match=re.escape(str(missing))):
        ffi.check(ffi.lib.hobbit_open, bytes(missing), ffi.ffi.NULL, 0, model)
    assert model[0] == ffi.ffi.NULL
    error = ffi.last_error()
    assert error is not None
    assert str(missing) in error
    ffi.lib.hobbit_clear_last_error()
    assert ffi.last_error() is None


def _python(program: str, tmp_path: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    # a worker of xdist inherits the variable from the process that has imported pyhobbit alone
    inherited = {name: value for name, value in os.environ.items() if name != "LLAMA_CPP_LIB_PATH"}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("before", [None, "/elsewhere", str(LIB_DIR)])
def test_the_library_path_is_set_for_llama_cpp_alone(before: str | None, tmp_path: Path) -> None:
    environment = {} if before is None else {"LLAMA_CPP_LIB_PATH": before}
    program = "import json, os, pyhobbit.native.ffi; print(json.dumps(os.environ.get('LLAMA_CPP_LIB_PATH')))"
    done = _python(program, tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == before


def _assert_ours(done: subprocess.CompletedProcess[str]) -> None:
    """The program has printed the library that llama_cpp uses, and whether Hobbit is one of its models."""
    assert (done.returncode, done.stderr) == (0, "")
    library, is_llama = done.stdout.split()
    assert Path(library).parent.resolve() == LIB_DIR.resolve()
    assert is_llama == "True"


def test_llama_cpp_imported_after_the_package_has_our_libraries(tmp_path: Path) -> None:
    program = (
        "import pyhobbit, sys\n"
        "assert 'llama_cpp' not in sys.modules\n"
        "import llama_cpp\n"
        "print(llama_cpp.llama_cpp._lib._name, issubclass(pyhobbit.Hobbit, llama_cpp.Llama))\n"
    )
    _assert_ours(_python(program, tmp_path))


def test_another_llama_cpp_imported_before_is_an_error(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        f"os.environ['LLAMA_CPP_LIB_PATH'] = {str(tmp_path)!r}\n"
        "import llama_cpp\n"
        "import pyhobbit\n"
        "try:\n    pyhobbit.Engine\n"
        "except pyhobbit.HobbitError as e:\n    print(e)\n"
    )
    for library in LIB_DIR.glob("*.so*"):
        (tmp_path / library.name).symlink_to(library)
    done = _python(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"llama_cpp was imported before pyhobbit, with \S+; import pyhobbit first", done.stdout)


def test_the_low_level_bindings_match_the_library() -> None:
    """llama-cpp-python passes these structures by value: a layout that drifted would corrupt memory."""
    llama = ffi.llama
    model_params = llama.llama_model_default_params()
    context_params = llama.llama_context_default_params()
    assert not model_params.vocab_only
    assert model_params.use_extra_bufts
    assert context_params.n_batch >= context_params.n_ubatch > 0
    assert context_params.n_samplers == 0
    assert ctypes.sizeof(llama.llama_model_kv_override_value) == 128


def _llama_cpp_first(tmp_path: Path, *, own: bool) -> str:
    """The path of libraries that a llama_cpp sees which is imported first; own: it has some itself."""
    package = tmp_path / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    if own:
        (package / "lib" / "libllama.so").touch()
    (package / "__init__.py").write_text("import os\nseen = os.environ.get('LLAMA_CPP_LIB_PATH')\n")
    program = "import os, llama_cpp; assert 'LLAMA_CPP_LIB_PATH' not in os.environ; print(llama_cpp.seen)"
    done = _python(program, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_llama_cpp_with_libraries_of_its_own_keeps_them(tmp_path: Path) -> None:
    assert _llama_cpp_first(tmp_path, own=True) == "None"


def test_a_llama_cpp_without_libraries_gets_ours(tmp_path: Path) -> None:
    assert Path(_llama_cpp_first(tmp_path, own=False)).resolve() == LIB_DIR.resolve()


def test_llama_cpp_may_be_imported_first(tmp_path: Path) -> None:
    program = (
        "from llama_cpp import Llama, LlamaGrammar\n"
        "from pyhobbit import Hobbit\n"
        "import llama_cpp\n"
        "print(llama_cpp.llama_cpp._lib._name, issubclass(Hobbit, Llama))\n"
    )
    _assert_ours(_python(program, tmp_path))


def test_an_interpreter_that_uses_neither_starts_without_them(tmp_path: Path) -> None:
    program = "import sys; print(*{'pyhobbit', 'llama_cpp', 'numpy'}.intersection(sys.modules))"
    done = _python(program, tmp_path)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_a_process_that_loads_another_build_has_not_loaded_ours() -> None:
    """Else libllama of that build would find our libggml-hobbit, whose name is the same."""
    code = "import logits; print('ggml' in open('/proc/self/maps').read())"
    tests = Path(__file__).resolve().parents[1]
    assert subprocess.check_output([sys.executable, "-c", code], cwd=tests, text=True) == "False\n"


def test_a_folder_with_sources_alone_is_one_sentence(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.meta_path = [each for each in sys.meta_path if isinstance(each, type)]  # no editable package\n"
        f"sys.path.insert(0, {str(HEADERS.parents[1])!r})\n"
        "from pyhobbit import Hobbit\n"
    )
    done = _python(program, tmp_path)
    assert done.returncode == 1
    assert "/pyhobbit holds sources of pyhobbit, no libraries; start Python in another" in done.stderr


def test_the_images_of_a_llama_cpp_are_ours_too(tmp_path: Path) -> None:
    program = (
        "import os\n"
        "from llama_cpp import mtmd_cpp\n"
        "print(mtmd_cpp._libmtmd._name, 'MTMD_CPP_LIB' in os.environ)\n"
    )
    done = _python(program, tmp_path)
    library, is_set = done.stdout.split()
    assert (Path(library).parent.resolve(), is_set) == (LIB_DIR.resolve(), "False")
