# SPDX-License-Identifier: MIT
import json
from pathlib import Path

import models
import numpy as np
import pytest
import random_moe
from conftest import TESTS, RunPyhobbit
from gguf import GGUFReader
from models import stock_dir

from bench.analysis import figures
from pyhobbit.cli.main import main
from pyhobbit.model.model_file import read_model_file
from pyhobbit.routing.observe import Observations, Recorder
from pyhobbit.settings.config import EngineConfig

HELD_OUT = TESTS / "tiny_moe" / "heldout.txt"
SAME_CHOICE = 0.99


def _random_model(arch: str, folder: Path) -> Path:
    path = folder / f"{arch}.gguf"
    random_moe.write_model(random_moe.declare(arch), path, stock_dir())
    return path


def _error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["inspect", *map(str, arguments)]) in (1, 2)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines[-1].startswith("pyhobbit: error: "), captured.err
    return lines[-1]


#
# the file
#


def test_a_model_without_a_text_is_described(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_gguf), "--no-speed"]) == 0
    text = capsys.readouterr().out
    for part in ("llama, 11.7 million parameters", "8 per layer, 2 used per token", "18.0 MiB in f16"):
        assert part in text
    assert "everything in high precision" in text


def test_the_description_as_json(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_gguf), "--no-speed", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["layers_with_experts"] == list(range(6))
    assert (model["n_experts"], model["n_experts_used"]) == (8, 2)
    high, low = model["tiers"]
    assert (high["name"], high["types"]) == ("high", {"f16": 6 * 8 * 3 * 256 * 256 * 2})
    assert (low["bits_per_weight"], low["expert_bytes"]) == (4.5, 3 * 256 * 256 * 4.5 / 8)


def test_a_sidecar_is_part_of_the_description(
    tmp_path: Path, run_pyhobbit: RunPyhobbit, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _random_model("qwen3moe", tmp_path)
    done = run_pyhobbit("convert", "--low", "q4_0", "--sidecar", model)
    assert done.returncode == 0, done.stderr
    assert main(["inspect", str(model), "--no-speed"]) == 0
    assert "q4_0, 4.50 bits per weight" in capsys.readouterr().out
    assert "only further tiers" in _error(capsys, tmp_path / "qwen3moe.hobbit.gguf")


#
# the machine
#


def test_the_machine_is_part_of_the_description(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    done = run_pyhobbit("inspect", tiny_gguf, "--threads", 1, "--pools", "6M", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    memory, speed = document["memory"], document["speed"]
    assert memory["info"]["pool_slots_high"] == 16  # slots of 384 KiB
    assert speed["source"] == "sample"
    assert 0 < speed["hits"][0] < 1
    assert speed["tokens_per_second"] == pytest.approx(1 / (speed["compute_s"] + speed["wait_s"]))
    # all that is missing, and the tier that the thresholds leave out
    advice = " ".join(document["advice"])
    assert "more memory would hold every expert" in advice


def test_a_bound_that_does_not_suffice_is_an_error(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tiny_gguf), "--memory", "1M"]) == 1
    captured = capsys.readouterr()
    assert "11.7 million parameters" in captured.out
    assert "token/s" not in captured.out
    assert "the smallest that works is" in captured.err
    assert main(["inspect", str(tiny_gguf), "--memory", "1M", "--json"]) == 1
    assert capsys.readouterr().out == ""


def test_the_thresholds_that_are_given_are_shown(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", str(tiny_gguf), "--no-speed", "--set", "t1=0.6", "--set", "t2=0.9"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "precision     rule gate, t1 = 0.6, t2 = 0.9" in text
    assert "low pool" in text
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["model"]["t1"], document["model"]["t2"]) == (0.6, 0.9)
    assert (document["memory"]["info"]["t1"], document["memory"]["info"]["t2"]) == (0.6, 0.9)


def _observe(path: Path, n_ctx: int, n_chunks: int) -> Observations:
    from pyhobbit.quality.evaluate import Evaluator

    config = EngineConfig(n_ctx=n_ctx, n_threads=1)
    with Evaluator(path, config) as evaluator:
        chunks = evaluator.chunks(HELD_OUT.read_text()[:5000])[:n_chunks]
        recorder = Recorder(len(chunks), n_ctx, evaluator.info.n_layers, 1 << 30)
        with evaluator.observing(recorder):
            evaluator.reference(chunks)
    return recorder.observations()


def test_norms_are_those_of_the_experts_outputs(tiny_gguf: Path) -> None:
    seen = _observe(tiny_gguf, 64, 1)
    tensors = {tensor.name: tensor for tensor in GGUFReader(tiny_gguf).tensors}
    for layer in (0, 5):
        gate, up, down = (
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"].data.astype(np.float32)
            for part in ("gate", "up", "down")
        )
        for token in (1, 63):
            x = seen.inputs[token, layer]
            for rank, expert in enumerate(seen.experts[token, layer]):
                g = gate[expert] @ x
                output = down[expert] @ (g / (1 + np.exp(-g)) * (up[expert] @ x))
                assert seen.output_norms[token, layer, rank] == pytest.approx(
                    np.linalg.norm(output), rel=5e-3
                )


@pytest.mark.parametrize(
    "arch", ["qwen3moe", "olmoe", "deepseek2", "glm4moe", "gpt-oss", "llama4", "granitemoe", "phimoe"]
)
def test_the_files_routers_explain_what_is_chosen(arch: str, tmp_path: Path) -> None:
    path = _random_model(arch, tmp_path)
    seen = _observe(path, 64, 2)
    assert seen.inputs is not None
    model = read_model_file(path)
    routers = model.routers([model.blocks[layer] for layer in seen.layers])
    assert routers is not None
    assert figures.prediction(seen, routers)[1][0].mean() > SAME_CHOICE


#
# errors
#


def test_errors_are_one_sentence(tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in _error(capsys, tmp_path / "none.gguf")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "none.gguf")
    assert "link.gguf is a link to a file that is gone; pull it again" in _error(
        capsys, tmp_path / "link.gguf"
    )
    assert "t1 (0.9) must not be above t2 (0.5)" in _error(
        capsys, tiny_gguf, "--set", "t1=0.9", "--set", "t2=0.5"
    )


def test_of_a_dense_model_it_says_whether_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dense.gguf"
    models.write_dense_llama(path)
    assert main(["inspect", str(path)]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["memory"].startswith("a dense model has no experts to cache")
    assert rows["fits"].startswith("yes: it takes ")
