# SPDX-License-Identifier: MIT
"""The types of a low tier that nobody named, and weights that a type cannot hold."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from convert_fixtures import PARTS, run_converter, tensor_values, write_moe
from gguf import GGUFReader

from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.quantize import dequantize, quantize, type_by_name

ROOT = Path(__file__).parents[2]


def low_types(path: Path) -> dict[str, str]:
    """The low tier's types in layer 0, by part."""
    names = {f"blk.0.{part}.low.0.weight": part for part in PARTS}
    return {
        names[each.name]: each.type.name.upper() for each in read_gguf(path).tensors if each.name in names
    }


# Rows of 256 values in gate and up.
@pytest.mark.parametrize(
    ("high", "n_ff", "up", "down"),
    [
        ("f16", 1408, "Q4_0", "Q4_0"),
        ("q8_0", 1856, "Q4_0", "Q4_0"),
        ("q5_1", 1408, "Q3_K", "Q4_0"),
        ("q5_0", 1408, "Q3_K", "Q4_0"),
        ("q4_0", 1408, "Q2_K", "Q2_0"),
        ("q4_1", 2880, "Q2_K", "Q2_0"),
        ("iq4_nl", 1856, "Q2_K", "Q2_0"),
        ("mxfp4", 2880, "Q2_K", "Q2_0"),
        ("mxfp4", 5760, "Q2_K", "Q2_0"),
        ("q4_0", 512, "Q2_K", "Q2_K"),
        ("q4_0", 96, "Q2_K", "Q4_0"),  # nothing is smaller: the high tier's own type
        ("f16", 80, "Q4_0", "F16"),
    ],
)
def test_each_tensor_gets_a_type_that_fits(tmp_path: Path, high: str, n_ff: int, up: str, down: str) -> None:
    model = write_moe(tmp_path / "model.gguf", high, n_ff=n_ff)
    done = run_converter("--sidecar", model)
    assert done.returncode == 0, done.stderr
    assert low_types(tmp_path / "model.hobbit.gguf") == dict(zip(PARTS, (up, up, down), strict=True))


@pytest.mark.parametrize(("high", "low"), [("q5_0", "Q2_0"), ("mxfp4", "Q2_0"), ("q8_0", "Q4_0")])
def test_a_model_without_a_row_for_k_types_gets_less_than_its_bits(
    tmp_path: Path, high: str, low: str
) -> None:
    model = write_moe(tmp_path / "model.gguf", high, parts=("ffn_down_exps",), n_ff=2880)
    assert low_types(convert(Options(model, sidecar=True))) == {"ffn_down_exps": low}
    with pytest.raises(HobbitError, match="leave --low out"):
        convert(Options(model, low="q2_k", sidecar=True, force=True))


@pytest.mark.parametrize(("high", "low", "down"), [("q4_0", "q2_k", "Q2_0"), ("q8_0", "q3_k", "Q4_0")])
def test_a_named_type_is_replaced_where_it_does_not_fit(
    tmp_path: Path, high: str, low: str, down: str
) -> None:
    model = write_moe(tmp_path / "model.gguf", high, n_ff=1408)
    done = run_converter("--low", low, "--sidecar", model)
    assert low_types(tmp_path / "model.hobbit.gguf") == dict(
        zip(PARTS, (low.upper(), low.upper(), down), strict=True)
    )
    assert "note: 2 tensors, such as blk.0.ffn_down_exps.weight, in " in done.stderr


def test_the_advice_of_inspect_is_a_command_that_works(tmp_path: Path) -> None:
    model = tmp_path / "my model.gguf"
    shape = "--experts 8 --used 2 --layers 2 --embd 128 --heads 2 --heads-kv 1 --ff 320"
    maker = [sys.executable, ROOT / "tests/random_moe.py", "--lib-dir", ROOT / "build/stock/bin", "-o", model]
    types = ["--arch", "qwen3moe", "--experts-type", "mxfp4", "--dense-type", "f16"]
    subprocess.run([*maker, *types, *shape.split()], check=True)
    inspect = [sys.executable, "-m", "pyhobbit", "inspect", model, "--pools", "300K", "--no-speed"]
    for expected in (1, 0):
        said = subprocess.run(inspect, capture_output=True, text=True, check=True).stdout
        commands = re.findall(r"(pyhobbit convert .*)", said)
        assert len(commands) == expected
        for command in commands:
            subprocess.run([sys.executable, "-m", *shlex.split(command)], check=True)


@pytest.mark.parametrize("weighted", [False, True])
def test_q2_0_is_fitted(weighted: bool) -> None:
    rng, q2_0, n = np.random.default_rng(1), type_by_name("q2_0"), 2880
    rows = rng.standard_normal((64, n), np.float32) * np.float32(0.02)
    rows[3, 64:128] = 0
    weights = rng.exponential(size=n).astype(np.float32) ** 2 if weighted else None
    found = dequantize(q2_0, quantize(q2_0, rows, weights), n)
    share = np.ones(n) if weights is None else weights
    error = np.sqrt((share * (found - rows) ** 2).sum() / (share * rows**2).sum())
    assert error < (0.33 if weighted else 0.36)  # ggml's own: 0.72
    assert not found[3, 64:128].any()
    best = np.abs(rows).max()
    for value in (best, -best):  # a block of one large weight
        alone = np.zeros((1, 64), np.float32)
        alone[0, 5] = value
        np.testing.assert_allclose(dequantize(q2_0, quantize(q2_0, alone, None), 64), alone, rtol=1e-3)


@pytest.mark.parametrize("low", ["q3_k", "q2_k", "q2_0", "q4_0", "iq3_s", "mxfp4"])
@pytest.mark.parametrize("value", [1e30, -1e20])
def test_a_weight_that_the_low_type_cannot_hold_is_named(tmp_path: Path, low: str, value: float) -> None:
    model = write_moe(tmp_path / "model.gguf", "f32")
    tensor = next(each for each in GGUFReader(model).tensors if each.name == "blk.1.ffn_up_exps.weight")
    with model.open("r+b") as file:
        file.seek(tensor.data_offset + 4000)
        file.write(np.float32(value).tobytes())
    done = run_converter(model, "--low", low)
    assert done.returncode == 1
    says = f"'blk.1.ffn_up_exps.weight': the weights exceed the range of .*; the largest is {value:g}"
    assert re.search(re.escape(says).replace(r"\.\*", ".*"), done.stderr.splitlines()[-1])
    assert list(tmp_path.iterdir()) == [model]


def test_large_weights_within_the_range_are_kept(tmp_path: Path) -> None:
    model = write_moe(tmp_path / "model.gguf", "f32", expert_scale=1e4)
    low, high = tensor_values(convert(Options(model, low="q3_k"))), tensor_values(model)
    for name, values in high.items():
        if name.endswith("exps.weight"):
            error = np.linalg.norm(low[name.replace(".weight", ".low.0.weight")] - values)
            assert error < 0.2 * np.linalg.norm(values)
