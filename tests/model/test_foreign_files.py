# SPDX-License-Identifier: MIT
"""Files of other programs: each verb says the same sentence, and none calls them damaged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import models
import pytest
from fake_hub import Hub, at, serving
from foreign import FORMS, Make, beside, keys

from pyhobbit.cli.several_models import find_models
from pyhobbit.errors import HobbitError, LoadError
from pyhobbit.model.download import fetch
from pyhobbit.model.downloaded import models_in
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.model_file import check_form
from pyhobbit.model.names import check_model_file


@pytest.mark.slow
def test_every_verb_says_the_same() -> None:
    """Prints the table of forms by verb."""
    command = [sys.executable, Path(__file__).with_name("foreign.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| all |") > 15


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        *("GGUF of ik_llama.cpp", "GGUF, newer architecture", "GGUF, newer tokenizer", "GGUF of Ollama"),
        *("GGUF, tensor per expert", "projector"),
    ],
)
def test_nothing_is_downloaded_that_cannot_be_loaded(form: str, tmp_path: Path) -> None:
    make, sentence = FORMS[form]
    make(tmp_path / "m.gguf")
    bad, good = (tmp_path / "m.gguf").read_bytes(), models.tiny().read_bytes()
    repos = {"u/both": {"M-Q4_0.gguf": bad, "M-Q8_0.gguf": good}, "u/bad": {"M-Q8_0.gguf": bad}}
    with serving(Hub(repos)) as hub, at(hub.endpoint):
        for name in ("u/bad", "u/both:Q4_0"):
            with pytest.raises(HobbitError, match=re.escape(sentence)):
                fetch(name, cache=tmp_path)
        assert hub.served == []
        table = hub.run(tmp_path, "inspect", "u/both", "--set", "disk_speed=1G")
        assert "Q8_0" in table.stdout
        assert "Q4_0" not in table.stdout
        pulled = hub.run(tmp_path, "pull", "u/both")
        assert pulled.stdout.strip().endswith("M-Q8_0.gguf"), pulled.stderr
        assert hub.run(tmp_path, "pull", "u/bad").returncode == 1
        assert [name for name, _ in hub.served] == ["M-Q8_0.gguf"]


@pytest.mark.parametrize(
    "make",
    [
        keys(general__architecture="gptoss"),
        keys(llama__rope__dimension_sections=[1, 2, 3]),
        beside("blk.0.ssm_dt"),
    ],
)
def test_forms_of_ollama_are_known_by_their_headers(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "m.gguf")
    with pytest.raises(LoadError, match="is in Ollama's own form"):
        check_form([read_gguf(tmp_path / "m.gguf")])


def test_raw_pieces_are_named(tmp_path: Path) -> None:
    files = {"M.Q6_K.gguf.part1of2": b"GGUF", "M.Q6_K.gguf.part2of2": b"x", "M.Q4_K_S.gguf": b"GGUF"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    joined = "M.Q6_K.gguf lies in 2 pieces; join them with: cat M.Q6_K.gguf.part1of2 M.Q6_K.gguf.part2of2 > M"
    for name in ("M.Q6_K.gguf.part1of2", "M.Q6_K.gguf.part2of2", "M.Q6_K.gguf"):
        with pytest.raises(HobbitError, match=joined):
            check_model_file(tmp_path / name)
    alone = {name: data for name, data in files.items() if "part" in name}
    with serving(Hub({"u/m": files, "u/alone": alone})) as hub, at(hub.endpoint):
        for name in ("u/m:Q6_K", "u/alone"):
            with pytest.raises(HobbitError, match=joined):
                fetch(name, cache=tmp_path / "cache")


def test_mistrals_own_form_is_named_before_the_download(tmp_path: Path) -> None:
    files = {"params.json": b"{}", "consolidated.safetensors": b"x"}
    with serving(Hub({"u/m": files})) as hub, at(hub.endpoint):
        with pytest.raises(HobbitError, match="u/m is in Mistral's own form"):
            fetch("u/m", True, cache=tmp_path)
        assert hub.served == []


@pytest.mark.parametrize(
    ("quantised", "form"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"bits": 4}, "quantization": {"bits": 4}}, "MLX"),
    ],
)
def test_what_is_quantised_is_named_before_its_weights_come(
    quantised: object, form: str, tmp_path: Path
) -> None:
    files = {"config.json": json.dumps(quantised).encode(), "model.safetensors": b"x" * 1000}
    with serving(Hub({"u/m": files})) as hub, at(hub.endpoint):
        with pytest.raises(HobbitError, match=rf"^u/m is quantised already \({form}\): take the checkpoint"):
            fetch("u/m", True, cache=tmp_path)
        assert [name for name, _ in hub.served] == ["config.json"]


@pytest.mark.parametrize("config", [b"{", b"[]", b"[" * 100_000, b'{"quantization_config": 5}', b"\xff"])
def test_what_config_json_does_not_tell_is_left_to_the_conversion(config: bytes, tmp_path: Path) -> None:
    with serving(Hub({"u/m": {"config.json": config, "model.safetensors": b"x"}})) as hub, at(hub.endpoint):
        assert fetch("u/m", True, cache=tmp_path).is_dir()


def test_the_header_decides_what_a_file_is(tmp_path: Path) -> None:
    """Links to companions, endings in upper case, and options that a server of a folder does not read."""
    low, calibration = tmp_path / "x/a.hobbit.gguf", tmp_path / "x/a.calibration.gguf"
    low.parent.mkdir()
    models.copy_gguf(models.tiny(), low, keys={"general.architecture": "hobbit-sidecar"})
    models.copy_gguf(models.tiny(), calibration, keys={"general.architecture": "hobbit-calibration"})
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "linked.gguf").symlink_to(low)
    (folder / "linkcal.gguf").symlink_to(calibration)
    (folder / "UPPER.GGUF").symlink_to(models.tiny())
    (folder / "UPPER.toml").write_text('memory = "600M"')
    presets, problems = find_models(folder)
    assert list(presets) == ["UPPER"]
    assert [each.split(": ")[0] for each in problems] == [str(folder / "UPPER.toml")]
    assert [model.path.name for model in models_in(folder)] == ["UPPER.GGUF"]
