# SPDX-License-Identifier: MIT
"""bench/report.py on the tiny model: its lines and its page, going on, and what it leaves out."""

import html
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
from conftest import TESTS

from bench.analysis import quality, speed
from bench.analysis.part import Run, calibrated_rule
from pyhobbit.errors import HobbitError
from pyhobbit.model.model_file import read_model_file
from pyhobbit.quality.evaluate import Costs
from pyhobbit.quality.stored import Calibration

TEXT = TESTS / "tiny_moe" / "heldout.txt"
PARTS = ("routing", "answers", "skipping", "systems", "confidence")
GIVEN = ("--text", TEXT, "--chunks", 2, "--threads", 1, "--reps", 1, "--hours", 99)

pytestmark = pytest.mark.model


def _report(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    words = [models.tiny_tiers("q8_0", "q2_k"), *GIVEN, "--output", folder, *options]
    return subprocess.run(
        [sys.executable, models.ROOT / "bench/report.py", *map(str, words)],
        cwd=folder.parent, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip


def _lines(folder: Path) -> dict[str, dict[str, Any]]:
    _, *lines = map(json.loads, (folder / "lines.jsonl").read_text().splitlines())
    return {line["part"]: line for line in lines}


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "out"
    done = _report(folder, "--parts", *PARTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(folder / "report.html")
    return folder


def _figure(folder: Path, part: str, paper: str) -> dict[str, Any]:
    return next(each for each in _lines(folder)[part]["figures"] if paper in each["papers"])


def test_routing_is_that_of_the_tiny_model(reported: Path) -> None:
    page = html.unescape((reported / "report.html").read_text("utf-8"))
    assert "**HOBBIT Fig. 5a**: gate weight and output" in page
    assert "the paper: gate weight by weighted output, r 0.99." in page
    assert _figure(reported, "routing", "The text")["rows"][0] == {"what": "tokens", "value": 1024}
    assert 10 < _figure(reported, "routing", "The text")["rows"][1]["value"] < 30
    by_policy = {row.pop("policy"): row for row in _figure(reported, "routing", "EdgeMoE Fig. 14")["rows"]}
    penalty = "penalty at 50% by random's"  # at less a layer has no more than its even share
    assert by_policy["belady"][penalty] < by_policy["echo"][penalty] < by_policy["random"][penalty] == 1
    assert "22% placed" in _figure(reported, "routing", "Twiddler Fig. 8")["title"]
    cosine = _figure(reported, "answers", "DAOP Table II")["series"]["cosine"]
    assert len(cosine) == 6
    assert all(0.3 < value <= 1 for value in cosine)
    skipping = _figure(reported, "skipping", "HOBBIT Fig. 3b")
    assert skipping["x"] == [0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert skipping["series"]["skipped"][-1] > skipping["series"]["low"][-1]


def test_configurations_do_what_their_names_say(reported: Path) -> None:
    rows = {row["configuration"]: row for row in _figure(reported, "systems", "HOBBIT Fig. 16")["rows"]}
    assert rows["demand loading, no cache"]["hits"] == rows["demand loading, all low"]["hits"] == 0
    by_demand = [rows[f"demand loading, {name}"]["MB/token"] for name in ("no cache", "all low")]
    assert 2.625 / 8.5 < by_demand[1] / by_demand[0] < 0.4  # q2_k by q8_0; some parts have a finer type
    assert rows["all in memory"]["hits"] == 1
    assert rows["all high, our defaults"]["KL divergence"] == 0
    assert rows["HOBBIT, all high"]["high / low / skipped"] == "100% / 0% / 0%"
    assert "0%" not in rows["HOBBIT"]["high / low / skipped"].replace("10%", "").split(" / ")
    # between HOBBIT's own arms this also depends on prefetches, and so on the machine's load
    assert rows["HOBBIT"]["MB/token"] < rows["demand loading, no cache"]["MB/token"]
    assert rows["half of the experts"]["KL divergence"] > rows["MoBiLE"]["KL divergence"] > 0
    twice = [row["computed twice"] for row in _figure(reported, "confidence", "MoBiLE Fig. 5")["rows"]]
    assert twice[:3] == [0, 0, 0]
    assert 0 < twice[3] < twice[4] < twice[5] < 1


def test_it_goes_on_where_it_stopped(reported: Path) -> None:
    before = (reported / "lines.jsonl").read_text()
    page = (reported / "report.html").read_text()
    done = _report(reported, "--parts", *PARTS, "--hours", 0)
    assert (done.returncode, done.stderr) == (0, "")
    assert (reported / "lines.jsonl").read_text() == before
    assert (reported / "report.html").read_text() == page
    done = _report(reported, "--parts", "words", "--hours", 0)
    assert "report: words: not run, the time was over" in done.stderr
    assert _lines(reported)["words"]["not_run"] == "the time was over; give more --hours"
    done = _report(reported, "--parts", "words")
    assert done.returncode == 0, done.stderr
    words = _figure(reported, "words", "The words of --quality")["rows"]
    lost = {row["configuration"]: row["KL divergence"] for row in words}
    assert lost["lossless"] == 0 < min(lost["small-loss"], lost["fast"])  # prefetch decides which loses more
    alone = [lost[f"{word}, no prefetch"] for word in ("lossless", "small-loss", "fast")]
    assert alone[0] == 0 < alone[1] < alone[2] < 0.1


def test_what_cannot_be_is_a_sentence(reported: Path, tmp_path: Path) -> None:
    done = _report(reported, "--memory", "400M")
    assert done.returncode == 1
    assert "is of another memory: 25 % of the experts; give another folder with --output" in done.stderr
    done = _report(tmp_path / "out0", "--chunks", 0)
    assert (done.returncode, done.stderr) == (2, "pyhobbit: error: --chunks is 0; it must be positive\n")
    short = tmp_path / "short.txt"
    short.write_text("def f():\n    return 1\n")
    done = _report(tmp_path / "out", "--text", short)
    assert done.returncode == 1
    assert done.stderr == "pyhobbit: error: the text has fewer than 512 tokens; give a longer one\n"
    done = _report(tmp_path / "out2", "--text", tmp_path / "none.txt")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    done = _report(tmp_path / "out3", "--parts", "types")
    assert done.returncode == 0, done.stderr
    lines = _lines(tmp_path / "out3")
    assert "already has tiers: convert the model that it was made from" in lines["types"]["not_run"]
    assert str(models.tiny_tiers("q8_0", "q2_k")) not in (tmp_path / "out3" / "lines.jsonl").read_text()


def test_the_rule_of_a_calibration_is_known(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(models.tiny_tiers("f16", "q4_0"))
    assert calibrated_rule(model) is None
    size, low_bytes = model.stat().st_size, 6 * 8 * 3 * 256 * 256 * 9 // 16
    costs = Costs((0.5,) * 48, (math.inf,) * 48)
    for rule in ("price", "edgemoe"):
        Calibration(size, low_bytes, {"price": 0.1}, rule=rule, costs=costs).write(model)
        assert calibrated_rule(model) == rule


def test_edgemoes_arms_add_widths_preloading_and_a_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(models.tiny_tiers("f16", "q4_0"))
    sizes = model.stat().st_size, 6 * 8 * 3 * 256 * 256 * 9 // 16
    costs = Costs((0.0, 0.5) * 24, (math.inf,) * 48)
    Calibration(*sizes, {"price": 0.1}, rule="edgemoe", costs=costs).write(model)
    run = Run(model, TEXT.read_text(), read_model_file(model, None), tmp_path, n_threads=1, reps=1)
    monkeypatch.setattr(speed, "_table", lambda _run, _papers, _title, arms: arms)
    (arms,) = speed.systems(run)
    names = [name for name in arms if name.startswith(("demand", "EdgeMoE"))]
    found = speed.measured(run, {name: arms[name] for name in names}, 64)
    done = [each[0] for name in names if isinstance(each := found[name], list)]
    high, low, widths, early, cached = done
    assert widths["hit_rate"] < 0.05  # a low version leaves room
    read = [each["counters"]["bytes_read"] for each in (low, widths, high)]
    assert read == sorted(read)
    assert 0.2 < widths["low_share"] == early["low_share"] < 0.8
    assert widths["counters"]["predicted"] == 0 < early["counters"]["predicted"]
    assert cached["hit_rate"] > early["hit_rate"] > 0


def test_widths_are_fitted_to_each_limit(tmp_path: Path) -> None:
    """Measures each expert alone, so the model has half as many as the tiny one."""
    model = tmp_path / "m.gguf"
    models.convert("--low", "q2_k", models.random_model("llama", "q8_0"), "-o", model)
    run = Run(model, TEXT.read_text(), read_model_file(model, None), tmp_path, n_chunks=2, n_threads=1)
    by_expert, by_limit = quality.widths(run)
    assert [len(row) for row in by_expert["values"]] == [8] * 3
    assert sum(value > 0 for row in by_expert["values"] for value in row) > 12  # the others are not used
    kib = [row["KiB per token"] for row in by_limit["rows"]]
    assert kib == sorted(kib, reverse=True)


def test_the_types_of_a_limit_are_those_on_either_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "TYPES", ("q8_0", "q4_0", "q2_k"))
    model = models.tiny()
    run = Run(model, TEXT.read_text(), read_model_file(model, None), tmp_path, n_chunks=1, n_threads=1)
    alone, pairs = (figure["rows"] for figure in quality.types(run))
    assert [row["experts"] for row in alone] == ["q8_0", "q4_0", "q2_K"]
    assert alone[0]["mean KL"] < 1e-3 < alone[1]["mean KL"] < 1e-2 < alone[2]["mean KL"]
    of = {row["KL at most"]: row["pyhobbit convert"] for row in pairs}
    assert of[1e-3] == "--high q8_0 --low q4_0"
    assert of[1e-2] == "--high q4_0 --low q2_K"
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(quality, "TYPES", ("f16",))
    with pytest.raises(HobbitError, match="the experts have 16 bits, and no usual type has fewer"):
        quality.types(run)
