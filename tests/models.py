# SPDX-License-Identifier: MIT
"""Model files and libraries for tests. Each file is made once per run, by whoever needs it first."""

from __future__ import annotations

import atexit
import fcntl
import functools
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import forked
import numpy as np
import random_moe
from gguf import GGUFReader, GGUFValueType, GGUFWriter, TokenType

from pyhobbit.native import paths

ROOT = Path(__file__).resolve().parent.parent
STOCK_DIR = Path(os.environ.get("STOCK_DIR", ROOT / "build/stock/bin"))
STOCK_TOOLS = Path(os.environ.get("STOCK_TOOLS", STOCK_DIR))  # its programs for this machine
LIB_DIR = Path(os.environ.get("LIB_DIR", paths.LIB_DIR))  # another llama.cpp's: docs/upgrading.md
TINY = ROOT / "tests/tiny_moe"
MIXED = "f16,q8_0,q4_0,q5_0,q4_k"  # five types over three parts: mixed within and between layers
Q4_K_M = "q4_k,q4_k,q6_k,q4_k,q4_k,q4_k"  # every other layer has a wider part
TIMEOUT_S = 900
FOLDER = "PYHOBBIT_TEST_MODELS"  # variable with the folder of a test run: conftest.py makes and removes it


def stock_dir() -> Path:
    """Libraries and programs of the unpatched llama.cpp."""
    return _checked(STOCK_DIR, "libllama.so", "make stock")


def lib_dir() -> Path:
    """Our libraries."""
    return _checked(LIB_DIR, "libggml-hobbit.so", "pip install .")


def bin_dir() -> Path:
    """Our builds of llama.cpp's programs."""
    return _checked(paths.BIN_DIR, "llama-perplexity", "pip install .")


def _checked(folder: Path, file: str, command: str) -> Path:
    if not (folder / file).exists():
        raise FileNotFoundError(f"{folder} holds no {file}: build it with `{command}` in {ROOT}")
    return folder


@functools.cache
def folder() -> Path:
    """The folder of all these files; a program without a test run removes it at its end."""
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER])
    made = Path(tempfile.mkdtemp(prefix="pyhobbit-models-"))
    atexit.register(shutil.rmtree, made)
    return made


def _once(make: Callable[..., Path]) -> Callable[..., Path]:
    """One call for all processes that share the folder; the others wait for it."""

    @functools.cache
    def made(*arguments: Any) -> Path:
        given = inspect.signature(make).bind(*arguments)
        given.apply_defaults()
        names = [make.__name__, *(getattr(each, "__name__", each) for each in given.args)]
        done = folder() / f"{' '.join(names)}.done"
        with done.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                done.write_text(str(make(*arguments)))
        return Path(done.read_text())

    return functools.wraps(make)(made)


def _call(*command: str | Path, **environment: str) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=dict(os.environ, **environment),
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(map(str, command))} exited with {done.returncode}:\n{done.stderr[-4000:]}"
        )


@_once
def tiny(float_type: str = "f16") -> Path:
    """The tiny trained model as llama.cpp's own converter writes it, in f32 or f16."""
    path = folder() / f"tiny-{float_type}.gguf"
    search = os.pathsep.join([str(paths.VENDOR_DIR), str(paths.VENDOR_DIR / "gguf-py")])
    script = paths.VENDOR_DIR / "convert_hf_to_gguf.py"
    _call(
        sys.executable, script, TINY / "model", "--outtype", float_type, "--outfile", path, PYTHONPATH=search
    )
    return path


@_once
def tiny_experts(kind: str) -> Path:
    """The tiny model with its experts in `kind` and everything else as in tiny("f16"): a plain stock GGUF."""
    if kind == "f16":
        return tiny()
    path = folder() / f"tiny-{kind}.gguf"
    keep = ("--tensor-type", "attn=f16", "--token-embedding-type", "f16", "--output-tensor-type", "f16")
    # q8_0 stands for "quantise at all"; every matrix is named
    _call(STOCK_TOOLS / "llama-quantize", "--tensor-type", f"exps={kind}", *keep, tiny(), path, "q8_0", "2")
    return path


def convert(*arguments: str | Path) -> None:
    """Whatever the sizes are; the output stores no thresholds, so that it runs all high."""
    done = forked.PYHOBBIT.run(["convert", "--force", "--set", "t1=1", *arguments], timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"convert {arguments} exited with {done.returncode}:\n{done.stderr[-4000:]}")


@_once
def tiny_tiers(high: str, low: str) -> Path:
    """The tiny model with two tiers, from our converter: the bytes that it makes of the checkpoint."""
    path = folder() / f"tiny-{high}-{low}.gguf"
    source = TINY / "model" if high == "f32" else tiny()  # its other weights are in f16
    convert("--low", low, "--high", high, source, "-o", path)
    return path


@_once
def tiny_sidecar(kind: str, low: str) -> Path:
    """tiny_experts(kind) with a low tier in a file beside it."""
    path = folder() / "sidecar" / f"tiny-{kind}.gguf"
    path.parent.mkdir(exist_ok=True)
    shutil.copyfile(tiny_experts(kind), path)
    convert("--low", low, "--sidecar", path)
    return path


@_once
def tiny_f32_experts(kind: str) -> Path:
    """tiny_experts(kind) with the same values in f32."""
    path = folder() / f"tiny-{kind}-f32.gguf"
    keep = ("--tensor-type", "attn=f16", "--token-embedding-type", "f16", "--output-tensor-type", "f16")
    options = ("--allow-requantize", "--tensor-type", "exps=f32", *keep)
    _call(STOCK_TOOLS / "llama-quantize", *options, tiny_experts(kind), path, "q8_0", "2")
    return path


def copy_gguf(
    source: Path,
    path: Path,
    template: str | None = None,
    split_max_tensors: int = 0,
    keys: Mapping[str, Any] | None = None,
    edit: Callable[[str, np.ndarray], Iterable[tuple[str, np.ndarray]]] | None = None,
) -> Path:
    """Writes a GGUF anew, with a chat template, or in several files of so many tensors at most.

    keys: in place of the file's; a number, a text or numbers. edit: what becomes of a tensor. Returns path.
    """
    reader = GGUFReader(source)
    given = dict(keys or {})
    name = given.pop("general.architecture", reader.fields["general.architecture"].contents())
    writer = GGUFWriter(path, name, split_max_tensors=split_max_tensors)
    for key, value in reader.fields.items():
        if not key.startswith("GGUF.") and key not in (*given, "general.architecture"):
            writer.add_key_value(key, value.contents(), value.types[0], value.types[-1])
    for key, value in given.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, GGUFValueType.get_type(value))
    writer.data_alignment = reader.alignment
    if template is not None:
        writer.add_chat_template(template)
    for tensor in reader.tensors:
        for made, data in edit(tensor.name, tensor.data) if edit else [(tensor.name, tensor.data)]:
            writer.add_tensor(made, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@_once
def split(model: Callable[[], Path]) -> Path:
    """The first of several files that together hold `model`."""
    source = model()
    copy_gguf(source, source.with_stem(f"split-{source.stem}"), split_max_tensors=10)
    return next(folder().glob(f"split-{source.stem}-00001-of-*.gguf"))


@_once
def random_model(arch: str, experts: str = MIXED) -> Path:
    """A small random-weight model; see random_moe.ARCHS."""
    path = folder() / f"{arch}-{experts.replace(',', '-')}.gguf"
    random_moe.write_model(random_moe.declare(arch, experts=experts), path, STOCK_TOOLS)
    return path


@_once
def random_two_tiers(arch: str, experts: str) -> Path:
    """random_model() with a low tier of the same bytes."""
    from pyhobbit.convert.pipeline import output_metadata
    from pyhobbit.convert.plan import Recipe, make_plan
    from pyhobbit.convert.read import read_model
    from pyhobbit.convert.write import write_output

    model = read_model(random_model(arch, experts))
    recipe = Recipe({tensor.name: tensor.type for tensor in model.tensors})
    path = model.path.with_stem(f"two-tiers-{model.path.stem}")
    plan, metadata = make_plan(model.tensors, recipe), output_metadata(model, recipe, [])
    write_output(path, plan, metadata, {}, threads=1, progress=lambda _n_bytes: None)
    return path


def routed_expert_bytes(path: Path) -> int:
    """Size of all routed experts in a GGUF of one tier."""
    tensors = GGUFReader(path).tensors
    return sum(int(t.n_bytes) for t in tensors if t.name.endswith("_exps.weight"))


def write_dense_llama(path: Path, chat_template: str | None = None) -> None:
    """One layer of random weights, a vocabulary of bytes."""
    n_embd, n_vocab = 64, 259
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(1)
    writer.add_feed_forward_length(n_embd)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)])
    writer.add_token_scores([0.0] * n_vocab)
    writer.add_token_types([TokenType.UNKNOWN] + [TokenType.CONTROL] * 2 + [TokenType.BYTE] * 256)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    rng = np.random.default_rng(1)
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", rng.standard_normal((n_vocab, n_embd), dtype=np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(n_embd, dtype=np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", rng.standard_normal((n_embd, n_embd), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
