# SPDX-License-Identifier: MIT
"""Files of other programs: each verb says the same sentence, and none calls them damaged."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import models
import numpy as np
import pytest
from conftest import RunPyhobbit
from fake_hub import Hub, serving

from pyhobbit.cli.several_models import find_models
from pyhobbit.convert.options import Options
from pyhobbit.convert.pipeline import convert
from pyhobbit.convert.read import read_model
from pyhobbit.errors import HobbitError, LoadError
from pyhobbit.model.download import fetch
from pyhobbit.model.downloaded import models_in
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.loading import check_loads
from pyhobbit.model.model_file import check_form
from pyhobbit.model.names import check_model_file

Tensors = Iterable[tuple[str, np.ndarray]]


def _bytes(change: Callable[[bytearray], None]) -> Callable[[Path, Path], None]:
    def make(source: Path, path: Path) -> None:
        data = bytearray(source.read_bytes())
        change(data)
        path.write_bytes(data)

    return make


def _type_139(data: bytearray) -> None:
    name = b"blk.0.ffn_gate_exps.weight"
    at = data.index(name) + len(name)
    struct.pack_into("<I", data, at + 4 + 8 * struct.unpack_from("<I", data, at)[0], 139)


def _big_endian(data: bytearray) -> None:
    data[4:8] = data[4:8][::-1]


def _new_architecture(data: bytearray) -> None:
    data[:] = data.replace(b"llama", b"llamq")


def _keys(**keys: object) -> Callable[[Path, Path], object]:
    named = {key.replace("__", "."): value for key, value in keys.items()}
    return lambda source, path: models.copy_gguf(source, path, keys=named)


def _tensors(edit: Callable[[str, np.ndarray], Tensors]) -> Callable[[Path, Path], object]:
    return lambda source, path: models.copy_gguf(source, path, edit=edit)


def _beside(name: str) -> Callable[[str, np.ndarray], Tensors]:
    return lambda own, data: [(own, data), *([(name, data)] if own == "output_norm.weight" else [])]


def _separate(name: str, data: np.ndarray) -> Tensors:
    part = re.fullmatch(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.weight", name)
    return [(f"{part[1]}.{i}.weight", each) for i, each in enumerate(data)] if part else [(name, data)]


FORMS = {
    "type": (_bytes(_type_139), "has the type 139, perhaps one of ik_llama.cpp's own"),
    "endian": (_bytes(_big_endian), "is for big-endian machines"),
    "architecture": (
        _bytes(_new_architecture),
        "the architecture 'llamq'; a newer pyhobbit may",
    ),
    "tokenizer": (_keys(tokenizer__ggml__model="zoo"), "does not know the tokenizer 'zoo'"),
    "tensor": (_tensors(_beside("extra.weight")), "wrong number of tensors; expected 64, got 63"),
    "vision": (_tensors(_beside("v.blk.0.weight")), "is in Ollama's own form"),
    "experts": (_tensors(_separate), "has one tensor per expert, as llama.cpp once wrote them"),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_verb_says_the_same(form: str, tmp_path: Path, run_pyhobbit: RunPyhobbit) -> None:
    path = tmp_path / "m.gguf"
    make, sentence = FORMS[form]
    make(models.tiny(), path)
    for arguments in (
        ("chat", path, "-p", "x", "-n", 1),
        ("chat", path, "--pools", "5M", "-p", "x", "-n", 1),
        ("inspect", path, "--no-speed"),
        ("convert", "--dry-run", "--sidecar", path),
    ):
        done = run_pyhobbit(*arguments)
        assert done.returncode == 1, arguments
        assert sentence in done.stderr.splitlines()[-1], arguments
        assert "damaged" not in done.stderr
        assert "download" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("form", ["type", "architecture", "tokenizer", "vision", "experts"])
def test_nothing_is_downloaded_that_cannot_be_loaded(form: str, tmp_path: Path) -> None:
    make, sentence = FORMS[form]
    make(models.tiny(), tmp_path / "m.gguf")
    bad, good = (tmp_path / "m.gguf").read_bytes(), models.tiny().read_bytes()
    with serving(
        Hub({"u/both": {"M-Q4_0.gguf": bad, "M-Q8_0.gguf": good}, "u/bad": {"M-Q8_0.gguf": bad}})
    ) as hub:
        for name in ("u/bad", "u/both:Q4_0"):
            with pytest.raises(HobbitError, match=re.escape(sentence)):
                fetch(name, endpoint=hub.endpoint, cache=tmp_path)
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
        _keys(general__architecture="gptoss"),
        _keys(llama__rope__dimension_sections=[1, 2, 3]),
        _tensors(_beside("blk.0.ssm_dt")),
    ],
)
def test_forms_of_ollama_are_known_by_their_headers(
    tmp_path: Path, make: Callable[[Path, Path], object]
) -> None:
    make(models.tiny(), tmp_path / "m.gguf")
    with pytest.raises(LoadError, match="is in Ollama's own form"):
        check_form([read_gguf(tmp_path / "m.gguf")])


@pytest.mark.slow
def test_convert_stacks_single_experts(tmp_path: Path) -> None:
    models.copy_gguf(models.tiny(), tmp_path / "old.gguf", edit=_separate)
    made = read_model(tmp_path / "old.gguf")
    output = convert(Options(tmp_path / "old.gguf", low="q4_0"))
    check_loads(output)
    expected = convert(Options(models.tiny(), low="q4_0", output=tmp_path / "tiny.gguf"))
    values = {each.name: each for each in read_gguf(expected).tensors}
    for tensor in read_gguf(output).tensors:
        same = values[tensor.name]
        assert tensor.ne == same.ne
        with tensor.path.open("rb") as ours, same.path.open("rb") as theirs:
            ours.seek(tensor.offset)
            theirs.seek(same.offset)
            assert ours.read(tensor.nbytes) == theirs.read(same.nbytes)
    assert any(tensor.chunks for tensor in made.tensors)


def test_raw_pieces_are_named(tmp_path: Path) -> None:
    files = {"M.Q6_K.gguf.part1of2": b"GGUF", "M.Q6_K.gguf.part2of2": b"x", "M.Q4_K_S.gguf": b"GGUF"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    joined = "M.Q6_K.gguf lies in 2 pieces; join them with: cat M.Q6_K.gguf.part1of2 M.Q6_K.gguf.part2of2 > M"
    for name in ("M.Q6_K.gguf.part1of2", "M.Q6_K.gguf.part2of2", "M.Q6_K.gguf"):
        with pytest.raises(HobbitError, match=joined):
            check_model_file(tmp_path / name)
    alone = {name: data for name, data in files.items() if "part" in name}
    with serving(Hub({"u/m": files, "u/alone": alone})) as hub:
        for name in ("u/m:Q6_K", "u/alone"):
            with pytest.raises(HobbitError, match=joined):
                fetch(name, endpoint=hub.endpoint, cache=tmp_path / "cache")


def test_mistrals_own_form_is_named_before_the_download(tmp_path: Path) -> None:
    files = {"params.json": b"{}", "consolidated.safetensors": b"x"}
    with serving(Hub({"u/m": files})) as hub:
        with pytest.raises(HobbitError, match="u/m is in Mistral's own form"):
            fetch("u/m", True, endpoint=hub.endpoint, cache=tmp_path)
        assert hub.served == []


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
