# SPDX-License-Identifier: MIT
"""`convert --split`: llama.cpp's own GGUF of a checkpoint and a sidecar, not one file with two tiers."""

from __future__ import annotations

from pathlib import Path

import logits
import models
import numpy as np
import pytest
from convert_fixtures import tensor_bytes
from exactness import SHORT_PLANS, assert_same_bits
from logits import Override

from pyhobbit.convert import pipeline
from pyhobbit.convert.options import Options
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import sidecar_path
from pyhobbit.model.gguf_file import read_gguf

CHECKPOINT = models.TINY / "model"


@pytest.mark.model
def test_the_base_is_the_converters_and_the_pair_computes_as_one_file_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thresholds = {"low": "q4_0", "t1": 0.5, "t2": 0.9}
    base = pipeline.convert(Options(CHECKPOINT, split=True, output=tmp_path / "m.gguf", **thresholds))
    printed = capsys.readouterr().err
    assert f"wrote {base}, as llama.cpp's converter does" in printed
    assert f"next: pyhobbit calibrate {base} --text FILE" in printed
    one = pipeline.convert(Options(CHECKPOINT, high="f16", output=tmp_path / "one.gguf", **thresholds))
    assert base is not None
    assert one is not None
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "m.hobbit.gguf", "one.gguf"}
    both = tensor_bytes(base) | tensor_bytes(sidecar_path(base))
    plain, whole = tensor_bytes(models.tiny()), tensor_bytes(one)
    assert tensor_bytes(base).keys() == plain.keys()
    assert both.keys() == whole.keys()
    for name, data in both.items():
        np.testing.assert_array_equal(data, whole[name], err_msg=name)
        np.testing.assert_array_equal(data, plain.get(name, data), err_msg=name)
    assert not [key for key in read_gguf(base).metadata if key.startswith("hobbit")]
    stored = read_gguf(sidecar_path(base)).metadata
    assert (stored["hobbit.t1"].value(), stored["hobbit.t2"].value()) == (0.5, 0.9)
    assert stored["hobbit.sidecar.base_name"].value() == "m.gguf"
    pools: dict[str, Override] = {"hobbit.pools": 6 << 20, "hobbit.strict": True}
    mixed = [logits.run(models.lib_dir(), path, SHORT_PLANS, pools) for path in (one, base)]
    assert mixed[0].stats["selections_low"] == mixed[1].stats["selections_low"] > 0
    stock = logits.run(models.stock_dir(), base, SHORT_PLANS)
    high = logits.run(models.lib_dir(), base, SHORT_PLANS, {**pools, "hobbit.t1": 1.0, "hobbit.t2": 1.0})
    for name in SHORT_PLANS:
        assert_same_bits(mixed[1].logits[name], mixed[0].logits[name])
        assert_same_bits(high.logits[name], stock.logits[name])


def test_what_cannot_be_split_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "m.gguf"
    for options, said in (
        (
            Options(models.tiny(), split=True, output=output),
            "--split is for a checkpoint, and MODEL is a GGUF",
        ),
        (Options(CHECKPOINT, split=True, high="q8_0", output=output), "--split its floats: drop --high"),
        (
            Options(CHECKPOINT, split=True, drop_high=0.5, output=output),
            "drop_high needs a file with two tiers",
        ),
        (
            Options(CHECKPOINT, split=True, sidecar=True, output=output),
            "--sidecar adds a tier to a GGUF",
        ),
    ):
        with pytest.raises(HobbitError, match=said):
            pipeline.convert(options)
    sidecar_path(output).touch()
    with pytest.raises(HobbitError, match=r"m\.hobbit\.gguf exists already"):
        pipeline.convert(Options(CHECKPOINT, split=True, output=output))
    sidecar_path(output).unlink()
    assert pipeline.convert(Options(CHECKPOINT, split=True, output=output, dry_run=True)) is None
    assert f"output {output}; disk space" in capsys.readouterr().out
    monkeypatch.setattr(pipeline, "_report", lambda *_: 1 / 0)
    monkeypatch.setattr(pipeline, "verify_output", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipeline.convert(Options(CHECKPOINT, split=True, output=output))
    assert not list(tmp_path.iterdir())
