# SPDX-License-Identifier: MIT
"""Whatever goes wrong: one sentence on stderr, exit status 1, and no file left behind."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from convert_fixtures import CONVERT, run_converter, write_moe
from gguf import GGUFReader, GGUFWriter
from tqdm.std import TqdmDefaultWriteLock

from pyhobbit.convert import pipeline
from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.errors import HobbitError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_moe(tmp_path / "model.gguf")


def assert_refused(model: Path, *arguments: object, says: Sequence[str], **options: object) -> None:
    """The command fails with one line that has all of `says`, and the folder stays as it is."""
    folder = model if model.is_dir() else model.parent
    before = sorted(folder.iterdir())
    done = run_converter(model, *arguments, **options)
    assert (done.returncode, done.stdout) == (1, "")
    message = done.stderr.splitlines()[-1]
    assert message.startswith("pyhobbit: error: ")
    assert "Traceback" not in done.stderr
    for text in says:
        assert text in message
    assert sorted(folder.iterdir()) == before


def test_missing_model(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nothing.gguf", says=["does not exist"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--low", "q4_k_m"), ["unknown type 'q4_k_m': did you mean q4_k?"]),
        (("--high", "int8"), ["unknown type 'int8'", " q4_0, ", " q4_k, ", " mxfp4, "]),
        (("-o", "{folder}/model.gguf", "--force"), ["is the model itself"]),
        (("-o", "{folder}/no/out.gguf"), ["in an existing folder"]),
        (("--sidecar", "--high", "q8_0"), ["drop --high"]),
        (("--threads", "0"), ["--threads 0"]),
        (("--low", "iq2_xxs"), ["importance matrix", "'blk.0.ffn_gate_exps.weight'", "--imatrix"]),
        (("--low", "iq1_m"), ["importance matrix", "'blk.0.ffn_gate_exps.weight'", "--imatrix"]),
    ],
)
def test_options_that_cannot_be(model: Path, arguments: Sequence[str], says: Sequence[str]) -> None:
    assert_refused(model, *(each.format(folder=model.parent) for each in arguments), says=says)


def test_existing_output(model: Path) -> None:
    output = model.with_name("model-hobbit.gguf")
    output.write_text("mine")
    assert_refused(model, says=["exists already", "--force"])
    assert output.read_text() == "mine"


def test_output_that_is_a_split_of_the_model(tmp_path: Path) -> None:
    write_moe(tmp_path / "model.gguf", split_max_tensors=5)
    first, second, *_ = sorted(tmp_path.glob("model-*.gguf"))
    assert_refused(first, "-o", second, "--force", says=["is one of the files to convert"])


@pytest.mark.parametrize("sidecar", [False, True])
@pytest.mark.parametrize(("kind", "low", "share"), [("q4_0", "q3_k", "76%"), ("q8_0", "f16", "188%")])
def test_low_tier_that_saves_little_is_for_those_who_insist(
    tmp_path: Path, kind: str, low: str, share: str, sidecar: bool
) -> None:
    model = write_moe(tmp_path / "model.gguf", kind)
    for dry_run in (False, True):
        with pytest.raises(HobbitError, match=f"{share} of the high tier's bytes.*, or insist with --force"):
            convert(Options(model, low=low, sidecar=sidecar, dry_run=dry_run))
    assert list(tmp_path.iterdir()) == [model]
    assert convert(Options(model, low=low, sidecar=sidecar, force=True)).exists()


def test_low_tier_of_at_most_three_quarters_is_taken(tmp_path: Path) -> None:
    model = write_moe(tmp_path / "model.gguf", "f32")
    assert convert(Options(model, high="q8_0", low="q5_1")).exists()  # 6 of 8.5 bits
    with pytest.raises(HobbitError, match="77% of the high tier's bytes"):
        convert(Options(model, high="q8_0", low="q6_k", force=False, output=tmp_path / "out.gguf"))


def test_experts_that_no_usual_type_halves(tmp_path: Path) -> None:
    model = write_moe(tmp_path / "model.gguf", "q3_k")
    assert_refused(
        model, says=["the experts have 3.44 bits per weight already", "--low TYPE and an importance matrix"]
    )
    model = write_moe(tmp_path / "q2.gguf", "q2_k")
    assert_refused(model, says=["the experts have 2.62 bits per weight already", "finer types"])
    assert_refused(model, "--low", "q2_k", says=["choose one of at most 75%, or insist"])
    model = write_moe(tmp_path / "iq1.gguf", "iq1_s", expert_scale=0)
    assert_refused(model, says=["no usual type has half of them"])


def test_dense_model(tmp_path: Path) -> None:
    assert_refused(write_moe(tmp_path / "dense.gguf", parts=()), says=["dense model", "nothing to split"])


def test_model_with_tiers(model: Path) -> None:
    output = convert(Options(model))
    assert_refused(output, says=["already has tiers"])
    sidecar = convert(Options(model, sidecar=True))
    assert_refused(sidecar, says=["is no model but holds only further tiers of one"])


def test_experts_in_tensors_of_their_own(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "old.gguf", "llama")
    writer.add_tensor("blk.0.ffn_gate.3.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for options in ([], ["--sidecar"]):
        assert_refused(tmp_path / "old.gguf", *options, says=["one tensor per expert"])


@pytest.mark.parametrize("missing", [1, 100_000, 3_000_000])
def test_truncated_model(model: Path, missing: int) -> None:
    size = GGUFReader(model).tensors[-1]
    end = size.data_offset + int(size.n_bytes)
    os.truncate(model, end - missing)
    assert_refused(model, says=["is truncated: tensor"])


def test_model_cut_in_its_header(model: Path) -> None:
    os.truncate(model, 200)
    assert_refused(model, says=["is damaged", "middle of its header"])


def test_empty_file_and_other_format(tmp_path: Path) -> None:
    empty, other = tmp_path / "empty.gguf", tmp_path / "other.gguf"
    empty.touch()
    other.write_bytes(b"PK\3\4" * 10)
    assert_refused(empty, says=["is empty"])
    assert_refused(other, says=["not a GGUF"])


def test_corrupted_header(model: Path) -> None:
    with model.open("r+b") as file:
        file.seek(24)  # the length of the first key
        file.write(b"\xff" * 8)
    assert_refused(model, says=["is damaged"])


def test_missing_split(tmp_path: Path) -> None:
    write_moe(tmp_path / "model.gguf", split_max_tensors=5)
    first, second, *_ = sorted(tmp_path.glob("model-*.gguf"))
    second.unlink()
    assert_refused(first, says=["a split of the model is missing", second.name])


def test_renamed_and_foreign_splits(tmp_path: Path) -> None:
    write_moe(tmp_path / "model.gguf", split_max_tensors=5)
    first, second, third, *_ = sorted(tmp_path.glob("model-*.gguf"))
    shutil.copy(third, second)
    assert_refused(first, says=[second.name, "is not split 2 of"])
    first.rename(tmp_path / "renamed.gguf")
    assert_refused(tmp_path / "renamed.gguf", says=["one of", "splits"])


def test_rows_that_the_blocks_divide_in_no_tensor(tmp_path: Path) -> None:
    model = write_moe(tmp_path / "model.gguf", parts=("ffn_down_exps",), n_ff=96)
    says = ["'blk.0.ffn_down_exps.weight'", "96 values", "256", "leave --low out"]
    assert_refused(model, "--low", "q4_k", says=says)
    assert_refused(model, "--high", "q4_k", says=[*says[:3], "q8_0"])
    assert convert(Options(model)).exists()
    assert convert(Options(model, high="q8_0", force=True)).exists()


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    model = write_moe(tmp_path / "model.gguf", "f32")
    tensor = next(tensor for tensor in GGUFReader(model).tensors if "up_exps.weight" in tensor.name)
    with model.open("r+b") as file:
        file.seek(tensor.data_offset + 4000)
        file.write(np.float32(np.nan).tobytes())
    assert_refused(model, says=["'blk.0.ffn_up_exps.weight'", "not finite"])


def test_infinite_weights_of_a_whole_file_are_refused(model: Path) -> None:
    tensor = next(tensor for tensor in GGUFReader(model).tensors if tensor.name == "token_embd.weight")
    with model.open("r+b") as file:
        file.seek(tensor.data_offset + 600)
        file.write(np.float16(np.inf).tobytes())
    assert_refused(
        model, says=["'token_embd.weight' has values that are infinite in f16: the model is damaged"]
    )
    assert convert(Options(model, sidecar=True)).exists()


def test_weights_beyond_the_range_of_the_type(tmp_path: Path) -> None:
    model = write_moe(tmp_path / "model.gguf", "f32", expert_scale=1e6)
    assert_refused(model, "--high", "f16", says=["exceed the range of f16"])


def test_disk_space_is_checked_before_starting(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    monkeypatch.setattr(pipeline, "write_output", lambda *_: pytest.fail("started to write"))
    with pytest.raises(HobbitError, match=r"not enough disk space in .*: 7\.\d MiB needed, 5\.0 MiB free"):
        convert(Options(model))


def test_disk_that_becomes_full_leaves_no_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def pwrite(*_: object) -> int:
        calls.append(1)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(HobbitError, match=r"the disk became full while .*model-hobbit\.gguf was written"):
        convert(Options(model))
    assert calls
    assert list(model.parent.iterdir()) == [model]


def test_a_folder_that_cannot_be_written_says_what_else_can(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(*_arguments: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(HobbitError, match=r"failed: Read-only file system; -o FILE writes elsewhere$"):
        convert(Options(model))


def test_limit_on_file_size_leaves_no_file(model: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    assert_refused(model, says=["failed: File too large"], preexec_fn=limit)


def damage(path: Path, position: Callable[[int], int]) -> None:
    with path.open("r+b") as file:
        offset = position(path.stat().st_size)
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("position", [lambda size: size - 4096, lambda _: 100], ids=["data", "header"])
def test_verification_finds_damage(
    model: Path, monkeypatch: pytest.MonkeyPatch, position: Callable[[int], int]
) -> None:
    original = pipeline.write_output

    def write_and_damage(path: Path, *arguments: object) -> object:
        result = original(path, *arguments)
        damage(path, position)
        return result

    monkeypatch.setattr(pipeline, "write_output", write_and_damage)
    with pytest.raises(HobbitError, match="reads back differently"):
        convert(Options(model))
    assert list(model.parent.iterdir()) == [model]


def test_verification_finds_an_expert_that_was_left_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pipeline.write_output
    monkeypatch.setattr(pipeline, "write_output", lambda *arguments: original(*arguments)[:-1])
    with pytest.raises(HobbitError, match=r"'blk.1.ffn_down_exps.low.0.weight' has \d+ of \d+ bytes"):
        convert(Options(model))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interruption_leaves_no_file(tmp_path: Path, number: signal.Signals) -> None:
    model = write_moe(tmp_path / "model.gguf", n_ff=4096)
    command = [*CONVERT, "--low", "iq3_s", str(model)]  # the slowest type: many seconds
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not any(each.stat().st_size for each in tmp_path.glob(".model-hobbit.gguf.*.tmp")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=300)
    if number == signal.SIGINT:
        assert process.returncode == 130
    else:
        assert process.returncode == 1
        assert stderr.splitlines()[-1].endswith("nothing was written")
    assert list(tmp_path.iterdir()) == [model]


def test_a_signal_finds_the_lock_of_a_bar_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm's own lock is two, and the release of its half would hide what a signal has raised."""

    def interrupted(lock: TqdmDefaultWriteLock) -> None:
        lock.locks[0].acquire()
        raise SystemExit("terminated: nothing was written")

    monkeypatch.setattr(TqdmDefaultWriteLock, "acquire", interrupted)
    with pipeline._progress("reading", 1) as progress:
        progress(1)
