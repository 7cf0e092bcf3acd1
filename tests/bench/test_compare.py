# SPDX-License-Identifier: MIT
"""bench.compare: that every arm runs and the output is complete, not how fast."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_jobs
import models
import numpy as np
import pytest

from bench import compare
from bench.harness import files, runner, system
from bench.harness import trace as routing
from bench.harness.arms import BY_NAME
from bench.harness.files import SHAPES
from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.native.machine import Disk

SMALL = replace(
    SHAPES["tiny"], n_layer=2, n_embd=256, n_ff=256, n_head=2, n_head_kv=1, head_dim=64, n_expert=16
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files.write_model(tmp_path_factory.mktemp("small"), "small", SMALL, "q8_0")


def _ours(model: Path, **settings: Any) -> dict[str, Any]:
    return bench_jobs.ours(**{"pools": 2 * model.stat().st_size, **settings})


STOCK = {"lib_dir": str(models.STOCK_DIR), "mmap": True}


def test_a_model_that_cannot_be_opened_says_why(small: Path) -> None:
    with pytest.raises(runner.ArmError, match="expert pools of 1000 bytes are too small"):
        bench_jobs.measure(small, **_ours(small, pools=1000))


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "olmoe", "phimoe", "llama", "deepseek2"])
def test_all_arms_compute_the_same_tokens(arch: str) -> None:
    model = models.random_model(arch)
    stock, ours = bench_jobs.measure(model, **STOCK), bench_jobs.measure(model, **_ours(model))
    assert ours.logits_crc == stock.logits_crc
    n_used = routing.moe_shape(model).n_used
    assert ours.counters["selections_high"] == 5 * ours.info["n_layers"] * n_used


def test_tokens_after_a_context_are_the_same_in_all_arms(tmp_path: Path) -> None:
    """By both ways to compute attention, which differ; and depth makes a difference."""
    model, kept = models.random_model("qwen3moe"), {}
    for depth, mode in ((0, "on"), (300, "on"), (300, "off")):
        for arm in (STOCK, _ours(model)):
            path = tmp_path / "kept.npz"
            bench_jobs.measure(model, kept=str(path), depth=depth, flash_attn=mode, **arm)
            logits = np.load(path)["logits"]
            assert np.array_equal(kept.setdefault((depth, mode), logits), logits)
    assert len({logits.tobytes() for logits in kept.values()}) == 3


def test_the_pools_are_full_before_the_first_token(tmp_path: Path) -> None:
    """In both tiers, from the disk; the model itself gets no calibration."""
    model = files.write_model(tmp_path, "small", SMALL, "q8_0")
    low = files.write_low_tier(model, SMALL, "q4_0")
    config = runner.BenchConfig(model, (BY_NAME["ours-eq2"],), low=low)
    before = sorted(tmp_path.iterdir())
    filled = runner.with_uses(config, config.arms[0], tmp_path / "all")
    for own in (config, filled):
        found = runner.start(replace(runner.job(own, config.arms[0], None), prompts=(4,), n_tokens=4))
        assert (found["hit_rate"] == 1) == own.fills == (found["counters"]["bytes_read"] == 0)
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "all-low"])


#
# models
#


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_declares_what_its_architecture_wants(name: str, tmp_path: Path) -> None:
    """Small versions of them compute finite logits, in stock, and in ours all in memory and mixed."""
    shape = SHAPES[name]
    small = replace(
        shape, n_layer=4 if shape.hybrid else 2, n_embd=256, n_head=4,
        n_head_kv=4 if shape.qk_norm == "all" else 2, head_dim=64,
        n_ff=256, n_expert=64, n_used=2, n_vocab=600,
    )  # fmt: skip
    model = files.write_model(tmp_path, name, small, "q4_0")
    low_tier = {"sidecar": files.write_low_tier(model, small, "q2_k").name, "t1": 0.0, "t2": 1.0}
    stock, resident = bench_jobs.measure(model, **STOCK), bench_jobs.measure(model, **_ours(model))
    assert resident.logits_crc == stock.logits_crc
    mixed = bench_jobs.measure(model, **_ours(model, pools=model.stat().st_size // 4, **low_tier))
    assert stock.n_decoded == mixed.n_decoded == 5
    assert mixed.counters["selections_low"] > 0


def test_a_model_is_made_once_and_again_where_it_is_another(tmp_path: Path) -> None:
    path = files.write_model(tmp_path, "small", SMALL, "q4_0")
    first = path.stat()
    assert files.write_model(tmp_path, "small", SMALL, "q4_0") == path
    assert path.stat().st_mtime_ns == first.st_mtime_ns
    with path.open("r+b") as file:
        file.truncate(first.st_size - 1)
    files.write_model(tmp_path, "small", SMALL, "q4_0")
    assert path.stat().st_size == first.st_size
    assert files.write_model(tmp_path, "small", SMALL, "q8_0") != path


def test_a_model_of_other_weights_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.write_model(tmp_path, "small", SMALL, "q4_0")
    first = path.read_bytes()
    monkeypatch.setattr(files, "_COMMON", 0.1)
    assert files.write_model(tmp_path, "small", SMALL, "q4_0") == path
    assert path.stat().st_size == len(first)
    assert path.read_bytes() != first


def test_llama_quantize_chooses_types(tmp_path: Path) -> None:
    path = files.write_model(tmp_path, "small", replace(SMALL, n_layer=9), "Q4_K_M", holes=True)
    types = {t.name: t.type.name for t in read_gguf(path).tensors}
    downs = [types[f"blk.{i}.ffn_down_exps.weight"] for i in range(9)]
    assert downs == ["q6_K", "q4_K", "q4_K", "q6_K", "q4_K", "q4_K", "q6_K", "q6_K", "q6_K"]
    assert (types["output.weight"], types["token_embd.weight"]) == ("q6_K", "q4_K")
    with pytest.raises(HobbitError, match="no llama-quantize that knows Q9"):
        files.write_model(tmp_path, "small", SMALL, "Q9")
    assert list(tmp_path.iterdir()) == [path]


def test_experts_differ(small: Path) -> None:
    tensor = next(t for t in read_gguf(small).tensors if t.name == "blk.1.ffn_up_exps.weight")
    data = small.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    size = tensor.nbytes // 16
    assert len({data[i * size : (i + 1) * size] for i in range(16)}) == 16


def test_a_type_that_does_not_fit_the_shape_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows of 2880 values are not whole blocks of q2_K"):
        files.write_model(tmp_path, "gpt", SHAPES["gpt-oss-120b"].scaled(1), "q2_k")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_the_disk_has_no_room_for_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=100 << 20))
    with pytest.raises(HobbitError, match="choose another --folder, or fewer --layers"):
        files.write_model(tmp_path, "large", SHAPES["mixtral-8x7b"].scaled(1), "q8_0")
    assert list(tmp_path.iterdir()) == []


#
# the machine
#


@contextmanager
def _limited(limit: int) -> Iterator[system.Cgroup]:
    try:
        with system.memory_cgroup(limit) as cgroup:
            yield cgroup
    except system.NoCgroupError as e:
        pytest.skip(str(e))


def test_a_memory_limit_holds_and_is_gone_afterwards() -> None:
    with _limited(64 << 20) as cgroup:
        hog = [sys.executable, "-S", "-c", "bytearray(200 << 20)"]
        done = subprocess.run(["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup.procs), *hog])
        assert done.returncode == -9
        assert cgroup.peak() <= 64 << 20
    assert not cgroup.procs.exists()


def test_without_the_right_to_make_a_cgroup_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_CGROUP_ROOT", tmp_path)
    with pytest.raises(system.NoCgroupError, match="run as root, or give --limits without a number"):
        system.memory_cgroup(1 << 30).__enter__()


def test_the_readahead_comes_back_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "read_ahead_kb"
    setting.write_text("8192\n")
    monkeypatch.setattr(system, "readahead_setting", lambda _path: setting)

    def fail() -> None:
        with system.readahead(tmp_path, 128):
            assert setting.read_text() == "128"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert setting.read_text() == "8192\n"
    with system.readahead(tmp_path, None):
        assert setting.read_text() == "8192\n"


@pytest.mark.parametrize("direct", [True, False])
def test_the_disk_is_measured_by_direct_reads(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(*given: object) -> Disk:
        asked.append(given)
        return Disk(2.5e8, 512 << 10, 4, direct)

    monkeypatch.setattr("pyhobbit.native.machine.measure_disk", measure)
    assert system.disk_bandwidth(Path("m.gguf"), 0.2) == (2.5e8 if direct else None)
    assert asked == [(Path("m.gguf"), 512 << 10, 4, 0.2)]


#
# runs
#


def test_arms_take_turns_within_a_repetition(small: Path) -> None:
    arms = tuple(BY_NAME[name] for name in ("stock", "stock-plain", "ours-resident", "ours"))
    order = runner.turns(runner.BenchConfig(small, arms, limits=(0.5, 0.25), reps=2, stock=models.STOCK_DIR))
    names = [(limit, arm.name) for arm, limit in order]
    free = [(None, "stock"), (None, "stock-plain"), (None, "ours-resident")]
    once = [*free, *((limit, name) for limit in (0.5, 0.25) for name in ("stock", "ours"))]
    assert names == once * 2


def test_stock_is_repacked_in_memory_and_mapped_under_a_limit(small: Path) -> None:
    config = runner.BenchConfig(small, (), stock=models.STOCK_DIR)
    for limit, expected in ((None, (False, True)), (1 << 30, (True, False))):
        job = runner.job(config, BY_NAME["stock"], limit)
        assert (job.mmap, job.repack) == expected
    assert runner.job(config, BY_NAME["ours"], 1 << 30).repack


def test_ours_gets_the_limit_less_a_margin(small: Path, tmp_path: Path) -> None:
    config = runner.BenchConfig(small, (), low=tmp_path / "low.gguf")
    limited = runner.job(config, BY_NAME["ours-eq2"], 10 << 30)
    assert limited.settings == {
        "hobbit.enable": True, "hobbit.calibrated": False, "hobbit.device": "CPU",
        "hobbit.memory": int(0.99 * (10 << 30)) + 1,
        "hobbit.sidecar": "low.gguf", "hobbit.t1": 0.6, "hobbit.t2": 0.9,
    }  # fmt: skip
    lossless = runner.job(config, BY_NAME["ours"], 10 << 30)
    assert (lossless.settings["hobbit.t1"], lossless.settings["hobbit.t2"]) == (1.0, 1.0)
    assert "hobbit.sidecar" not in lossless.settings
    free = runner.job(config, BY_NAME["ours-resident"], None)
    assert free.settings["hobbit.pools"] == 2 * small.stat().st_size


_IK_BY_STOCK = """
import os

os.environ["LLAMA_CPP_LIB_PATH"] = "{}"
from llama_cpp import llama_cpp as own
from llama_cpp.llama_cpp import *

past = 0

def llama_model_load_from_file(path, params):
    assert params.use_mmap and not params.repack_tensors
    return own.llama_model_load_from_file(path, params)

def llama_kv_cache_clear(context):
    global past
    past = 0
    own.llama_memory_clear(own.llama_get_memory(context), True)

def llama_batch(n_tokens, tokens, all_pos_0, all_pos_1):
    global past
    assert (all_pos_0, all_pos_1) == (past, 1)
    past += n_tokens
    return own.llama_batch_get_one(tokens, n_tokens)

llama_free_model = own.llama_model_free
"""


def test_ik_llama_cpp_is_called_by_its_own_names(small: Path, tmp_path: Path) -> None:
    """A package of its names with stock's libraries computes what stock does."""
    package = tmp_path / "ik_llama_cpp"
    package.mkdir()
    (package / "_ctypes_api.py").write_text(_IK_BY_STOCK.format(models.stock_dir()))
    ik = bench_jobs.measure(small, lib_dir=str(tmp_path), mmap=True, depth=9)
    stock = bench_jobs.measure(small, **STOCK, depth=9)
    assert (ik.logits_crc, ik.n_decoded) == (stock.logits_crc, stock.n_decoded)


#
# the command
#


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reps", "0"], "--reps takes a positive number"),
        (["--prompts", "0"], "--prompts and --depth take numbers of tokens"),
        (["--depth", "-1"], "--prompts and --depth take numbers of tokens"),
        (["--flash-attn", "auto"], "--flash-attn is auto; choose on or off"),
        (["--tokens", "0"], "--tokens takes a positive number"),
        (["--seconds", "0"], "--seconds takes a positive number"),
        (["--layers", "0"], "--layers is 0"),
        (["--arms", "theirs"], "unknown arm 'theirs'; choose one of stock, stock-128k"),
        (["--type", "q9"], "unknown type 'q9'"),
        (["--arms", "ours-eq2"], "the arm ours-eq2 needs a low tier; give --low TYPE"),
        (["--arms", "stock-plain", "--stock", "/none"], "build stock llama.cpp with 'make stock'"),
        (["--arms", "ik", "--ik", "/none"], "/none holds no ik_llama.cpp for the arm ik; run 'make ik'"),
    ],
)
def test_a_wrong_value_is_found_before_a_model_is_made(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--folder", str(tmp_path / "m"), "-o", str(tmp_path / "out")]
    assert compare.main(["--shape", "tiny", *folder, *options]) != 0
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", ["nope", "2", "0"])
def test_a_limit_that_is_no_share_is_a_wrong_command_line(
    limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.main(["--shape", "tiny", "--limits", limit])
    assert ended.value.code == 2
    assert f"{limit} is no share; give numbers above 0 to 1, or none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arms", "ours-eq2"], "the arm ours-eq2 needs a low tier; give --low TYPE"),
        (["--arms", "stock-plain", "--stock", "/none"], "build stock llama.cpp with 'make stock'"),
        (["--low", "q4_0"], "are for a --shape"),
    ],
)
def test_what_an_arm_lacks_is_told_before_anything_runs(
    options: list[str], message: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--model", str(small), "-o", str(tmp_path / "out"), *options]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def _configured(*options: object) -> runner.BenchConfig:
    parser = argparse.ArgumentParser()
    compare.add_options(parser)
    args = parser.parse_args([*map(str, options)])
    return compare.configured(args, compare.target_of(args))


def test_a_models_own_sidecar_decides_which_arms_run(small: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    shutil.copyfile(small, model)
    sidecar = convert(Options(model, low="q4_0", sidecar=True))
    config = _configured("--model", model, "--stock", models.stock_dir())
    assert config.low == sidecar
    assert {arm.low for arm in config.arms} == {False, True}


def test_a_model_with_two_tiers_in_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="has two tiers in itself"):
        _configured("--model", models.tiny_tiers("f16", "q4_0"))


def test_a_split_model_counts_with_all_its_parts(tmp_path: Path) -> None:
    first = models.split(models.tiny)
    parts = sorted(first.parent.glob(first.name.replace("00001-of", "*-of")))
    for part in parts:
        (tmp_path / part.name).symlink_to(part)
    config = _configured("--model", tmp_path / first.name, "--arms", "ours-resident")
    assert config.files == [tmp_path / part.name for part in parts]
    assert config.model_bytes == sum(part.stat().st_size for part in parts) > parts[0].stat().st_size
    assert runner.job(config, BY_NAME["ours-resident"], None).model == str(tmp_path / first.name)


def test_a_model_without_experts_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    low = files.write_low_tier(files.write_model(tmp_path, "small", SMALL, "q8_0"), SMALL, "q4_0")
    assert compare.main(["--model", str(low), "--arms", "ours-resident", "-o", str(tmp_path / "out")]) == 1
    assert "has no routed experts" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_small_bench_runs_every_arm(tmp_path: Path) -> None:
    """Runs the program as a user does; without cgroups only the arms that hold everything in memory."""
    try:
        with system.memory_cgroup(None):
            limits = ["0.8"]
    except system.NoCgroupError:
        limits = []
    options = {
        "--shape": "tiny", "--layers": 6, "--type": "q8_0", "--low": "q2_k",
        "--folder": tmp_path / "m", "--reps": 1, "--tokens": 4,
        "--warm-up": 2, "--seconds": 600, "--stock": models.stock_dir(), "--output": tmp_path / "out",
    }  # fmt: skip
    given = [str(part) for option in options.items() for part in option]
    given += ["--prompts", "4", "12", "--limits", *(limits or ["none"])]
    done = subprocess.run(
        [sys.executable, "-m", "bench.compare", *given],
        cwd=models.ROOT, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    run, results = lines[0], lines[1:]
    assert run["options"]["prompts"] == [4, 12]
    arms = [arm for arm in BY_NAME.values() if arm.build != "ik"]  # nobody installed it
    expected = [arm.name for arm in arms if arm.fits in (None, True)]
    expected += [arm.name for arm in arms if limits and arm.fits in (None, False)]
    assert [result["arm"] for result in results] == expected
    for result in results:
        assert result["n_decoded"] == 4
        assert set(result["ttft_s"]) == {"4", "12"}
        assert result["load_s"] > 0
        assert result["tokens_per_second"] > 0
        if result["limit_bytes"]:
            assert result["peak_bytes"] <= result["limit_bytes"]
    plain = {r["logits_crc"] for r in results if r["arm"] in ("stock-128k", "stock-plain")}
    assert len(plain) == 1
    assert done.stdout.rstrip("\n") == (tmp_path / "out/table.md").read_text().rstrip("\n")
    assert all(f"| {name} " in done.stdout for name in expected)
    if not limits:
        pytest.skip("no memory cgroup can be made here: the arms under a limit were left out")
