# SPDX-License-Identifier: MIT
"""High versions dropped by a calibration: what is written, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from convert_fixtures import N_EXPERT, N_LAYER, PARTS, ROUTED, run_converter, tensor_bytes, write_moe
from gguf import GGUFWriter

from pyhobbit.convert.options import Options
from pyhobbit.convert.partial import drop_high
from pyhobbit.convert.pipeline import convert
from pyhobbit.errors import HobbitError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.model.gguf_file import pack_header, read_gguf
from pyhobbit.model.model_file import read_model_file
from pyhobbit.model.tiers import read_tiers

KEPT = {0: (1, 2, 3), 1: (0,)}
DIVERGENCES = [0.0, 0.4, 0.6, 0.5, 0.7, 0.2, 0.1, 0.3]  # [layer][expert]; the four largest stay


def calibrated(
    model: Path,
    divergences: list[float] | None = None,
    size: int | None = None,
    rule: str = "edgemoe",
    price: float = 0.0,
) -> Path:
    """The model, with a calibration beside it."""
    values = DIVERGENCES if divergences is None else divergences
    writer = GGUFWriter(calibration_path(model), "hobbit")
    writer.add_uint64("hobbit.model_bytes", size or model.stat().st_size)
    writer.add_string("hobbit.rule", rule)
    writer.add_float64("hobbit.price", price)
    writer.add_array("hobbit.low_costs", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return model


@pytest.fixture
def two_tiers(tmp_path: Path) -> Path:
    plain = write_moe(tmp_path / "plain.gguf")
    return calibrated(convert(Options(plain, low="q4_0", output=tmp_path / "model.gguf")))


def test_the_most_sensitive_high_versions_stay_and_all_low_ones(two_tiers: Path) -> None:
    output = convert(Options(two_tiers, drop_high=0.5))
    assert output == two_tiers.with_name("model-partial.gguf")
    before, after = tensor_bytes(two_tiers), tensor_bytes(output)
    residents = {name for name in before if not any(name.startswith(f"{routed}.") for routed in ROUTED)}
    biases = {f"{routed}.bias" for routed in ROUTED}
    assert set(after) == residents | biases | {
        f"{routed}.{end}" for routed in ROUTED for end in ("weight", "high.0.weight")
    }
    for name in residents | biases:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    for layer, experts in KEPT.items():
        for part in PARTS:
            stem = f"blk.{layer}.{part}"
            np.testing.assert_array_equal(after[f"{stem}.weight"], before[f"{stem}.low.0.weight"])
            high = before[f"{stem}.weight"].reshape(N_EXPERT, -1)[list(experts)]
            np.testing.assert_array_equal(after[f"{stem}.high.0.weight"].ravel(), high.ravel())
            key = f"hobbit.tier.high.{stem}.0.experts"
            assert read_gguf(output).metadata[key].value() == list(experts)


def test_the_keys_say_what_is_there(two_tiers: Path) -> None:
    output = read_gguf(convert(Options(two_tiers, drop_high=0.5)))
    found = {key: entry.value() for key, entry in output.metadata.items()}
    assert found["hobbit.version"] == 3
    assert found["hobbit.base_tier"] == "low"
    assert (found["hobbit.tier.high.kind"], found["hobbit.tier.low.kind"]) == ("partial", "complete")
    before = {key: entry.value() for key, entry in read_gguf(two_tiers).metadata.items()}
    own = ("hobbit.version", "hobbit.tiers", "hobbit.base_tier", "hobbit.tier.")
    assert {k: v for k, v in before.items() if not k.startswith(own)} == {
        k: v for k, v in found.items() if not k.startswith(own)
    }
    assert read_tiers(output).plain == "low"


def test_the_smaller_file_is_described(two_tiers: Path) -> None:
    output = convert(Options(two_tiers, drop_high=0.5))
    before = {tier.name: tier for tier in read_model_file(two_tiers).tiers}
    after = {tier.name: tier for tier in read_model_file(output).tiers}
    assert after["low"].n_bytes == before["low"].n_bytes
    assert after["high"].n_bytes * 2 == before["high"].n_bytes
    assert after["high"].expert_bytes == before["high"].expert_bytes
    assert (after["high"].n_absent, after["high"].n_experts) == (4, 8)
    assert (after["low"].n_absent, before["high"].n_absent) == (0, 0)
    saved = two_tiers.stat().st_size - output.stat().st_size
    assert saved >= before["high"].n_bytes // 2


def test_the_limit_of_static_widths_says_how_many(two_tiers: Path) -> None:
    tiers = {tier.name: tier for tier in read_model_file(two_tiers).tiers}
    saved = 1 - tiers["low"].expert_bytes / tiers["high"].expert_bytes
    calibrated(two_tiers, price=0.35 / saved)
    output = read_gguf(convert(Options(two_tiers, drop_high="limit")))
    found = [
        list(output.metadata[f"hobbit.tier.high.blk.{layer}.ffn_up_exps.0.experts"].value())
        for layer in range(2)
    ]
    assert found == [[1, 2, 3], [0]]  # experts whose DIVERGENCES are 0.4 or more


def test_a_limit_that_says_nothing_is_refused(two_tiers: Path) -> None:
    calibration_path(two_tiers).unlink()
    with pytest.raises(HobbitError, match=r"from a calibration: run .* --text FILE --set rule=edgemoe"):
        convert(Options(two_tiers, drop_high="limit"))
    for rule, price, message in (
        ("price", 1.0, r"from a calibration: run .* --set rule=edgemoe"),
        ("edgemoe", 0.0, "keeps 0 of 8 experts low: some must go, and some stay; calibrate with another"),
        ("edgemoe", 9.0, "keeps 8 of 8 experts low"),
    ):
        calibrated(two_tiers, rule=rule, price=price)
        with pytest.raises(HobbitError, match=message):
            convert(Options(two_tiers, drop_high="limit"))


def test_a_layer_may_lose_all(two_tiers: Path) -> None:
    calibrated(two_tiers, [0.1, 0.1, 0.1, 0.1, 0.5, 0.6, 0.7, 0.8])
    output = convert(Options(two_tiers, drop_high=0.625))
    assert not [name for name in tensor_bytes(output) if name.startswith("blk.0.") and ".high." in name]
    assert read_model_file(output).tiers[0].n_absent == 5


def test_a_large_tensor_is_copied_in_pieces(two_tiers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert(Options(two_tiers, drop_high=0.5)).read_bytes()
    monkeypatch.setattr("pyhobbit.convert.write._MAX_PIECE_BYTES", 5000)
    assert convert(Options(two_tiers, drop_high=0.5, force=True)).read_bytes() == whole


def test_a_file_with_damaged_tiers_is_refused(two_tiers: Path) -> None:
    two_tiers.write_bytes(two_tiers.read_bytes().replace(b"ffn_up_exps.low.0", b"ffn_up_exps.mid.0"))
    with pytest.raises(HobbitError, match="belongs to no expert tensor of the model, or to no further tier"):
        drop_high(two_tiers, 0.5)


def test_dry_run_writes_nothing(two_tiers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(Options(two_tiers, drop_high=0.5, dry_run=True)) is None
    lost = "4 of 8 experts have a high version; the divergences of the others add up to 0.6 nats"
    assert lost in capsys.readouterr().out  # 0.0 + 0.2 + 0.1 + 0.3
    assert not two_tiers.with_name("model-partial.gguf").exists()


#
# refused
#


def test_a_file_that_the_engine_does_not_read_is_not_left(
    two_tiers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(two_tiers.parent.iterdir())
    monkeypatch.setattr("pyhobbit.convert.partial._VERSION", 9)
    with pytest.raises(HobbitError, match="is of hobbit format version 9, this program reads"):
        convert(Options(two_tiers, drop_high=0.5))
    assert sorted(two_tiers.parent.iterdir()) == before


def test_without_divergences_the_command_is_named(two_tiers: Path) -> None:
    command = f"pyhobbit calibrate {two_tiers} --text FILE --set rule=edgemoe"
    calibration_path(two_tiers).write_bytes(pack_header([], [], 32))
    with pytest.raises(HobbitError, match=command):
        drop_high(two_tiers, 0.5)
    calibration_path(two_tiers).unlink()
    with pytest.raises(HobbitError, match=command):
        drop_high(two_tiers, 0.5)
    calibrated(two_tiers, size=17)
    with pytest.raises(HobbitError, match=f"another model.*{command}"):
        drop_high(two_tiers, 0.5)
    calibrated(two_tiers, [0.1] * 7)
    with pytest.raises(HobbitError, match=f"another model.*{command}"):
        drop_high(two_tiers, 0.5)


@pytest.mark.parametrize(("share", "dropped"), [(0.01, "drops 0 of 8"), (0.99, "drops 8 of 8")])
def test_some_must_go_and_some_stay(two_tiers: Path, share: float, dropped: str) -> None:
    assert N_LAYER * N_EXPERT == 8
    with pytest.raises(HobbitError, match=dropped):
        drop_high(two_tiers, share)


def test_a_tier_of_an_unknown_kind_is_refused(two_tiers: Path) -> None:
    key = b"hobbit.tier.high.kind"
    before, _, after = two_tiers.read_bytes().partition(b"complete")
    assert key in before[-64:]
    two_tiers.write_bytes(before + b"residual" + after)
    with pytest.raises(HobbitError, match=r"hobbit\.tier\.high\.kind is 'residual', .*: convert it again"):
        drop_high(two_tiers, 0.5)


def test_files_that_nothing_can_be_dropped_of_are_refused(two_tiers: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.gguf"
    with pytest.raises(HobbitError, match="needs one file with two tiers"):
        drop_high(plain, 0.5)
    sidecar = convert(Options(plain, low="q4_0", sidecar=True))
    with pytest.raises(HobbitError, match="needs one file with two tiers"):
        drop_high(sidecar, 0.5)
    partial = calibrated(convert(Options(two_tiers, drop_high=0.5)))
    with pytest.raises(HobbitError, match="has some experts alone in high"):
        drop_high(partial, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "drop_high=0"], "give a share above 0 and below 1"),
        (["--set", "drop_high=1"], "give a share above 0 and below 1"),
        (["--set", "drop_high=nan"], "give a share above 0 and below 1"),
        (["--set", "drop_high=0.5", "--low", "q4_0"], "leaves types and thresholds as they are: drop --low"),
        (["--set", "drop_high=0.5", "--high", "keep"], "drop --high"),
        (["--set", "drop_high=0.5", "--sidecar"], "drop --sidecar"),
        (["--set", "drop_high=0.5", "--set", "t2=0.9"], "drop t2"),
        (["--set", "drop_high=half"], "'half' is neither a share, such as 0.5, nor limit"),
    ],
)
def test_options_that_cannot_be(two_tiers: Path, options: list[str], message: str) -> None:
    done = run_converter(two_tiers, *options)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
