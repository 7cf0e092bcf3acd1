# SPDX-License-Identifier: MIT
"""Files that are models, and the tags that name them, for every verb."""

from pathlib import Path

import pytest
from fake_hub import Hub, at, gguf, serving

from pyhobbit.errors import HobbitError
from pyhobbit.model.download import fetch
from pyhobbit.model.downloaded import downloaded_models, models_in, remove
from pyhobbit.model.file_names import is_model_name, label, the_one
from pyhobbit.model.gguf_file import pack_header, string_entry
from pyhobbit.model.names import repository_in


@pytest.mark.parametrize(
    "name",
    [
        "qwen3.8-35b-a3b-mtp-Q6_K.gguf",
        "Qwen3.6-35B-A3B-MTP-UD-Q4_K_XL.gguf",
        "M-imatrix-Q4_K_M.gguf",
        "M-Q4_K_M-imatrix.gguf",
        "notmmproj-Q4_0.gguf",
        "Qwen3-DRAFT-0.6B-Q4_0.gguf",
        "draftsman-Q4_0.gguf",
        "M-eagle3000-Q8_0.gguf",
    ],
)
def test_a_mark_inside_of_a_name_is_that_of_a_model(name: str) -> None:
    assert is_model_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "mtp-qwen3.8-Q8_0.gguf",
        "MTP-qwen3.8-Q8_0-00001-of-00002.gguf",
        "eagle3-m.gguf",
        "draft-M-Q4_0.gguf",
        "mmproj-F16.gguf",
        "mmproj.gguf",
        "M-mmproj-f16.gguf",
        "M.mmproj-Q8_0.gguf",
        "M-mmproj-model-BF16.gguf",
        "imatrix.gguf",
        "imatrix_unsloth.gguf",
        "M.imatrix.gguf",
        "M-Q8_0.imatrix.gguf",
        "M-imatrix.gguf",
    ],
)
def test_a_mark_at_its_place_is_no_model(name: str) -> None:
    assert not is_model_name(name)


def test_the_header_decides_where_it_is_at_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "mmproj-and-more.gguf": {"general.architecture": "qwen3moe", "general.type": "model"},
        "imatrix.gguf": {"general.architecture": "qwen3moe"},
        "vision.gguf": {"general.architecture": "clip"},
        "eyes.gguf": {"general.architecture": "qwen3vl", "general.type": "mmproj"},
        "weights.gguf": {"general.type": "imatrix"},
        "lora.gguf": {"general.architecture": "llama", "general.type": "adapter"},
        "mtp-m.gguf": {"general.architecture": "qwen35moe", "general.type": "model"},
        "mmproj-old.gguf": {},
        "old.gguf": {},
        "clip-tuned.gguf": {"general.architecture": "clipper"},
    }
    for name, keys in files.items():
        (tmp_path / name).write_bytes(pack_header([string_entry(*each) for each in keys.items()], [], 32))
    (tmp_path / "unreadable.gguf").write_bytes(b"GGUF")
    found = {model.path.name for model in models_in(tmp_path)}
    assert found == {"mmproj-and-more.gguf", "imatrix.gguf", "old.gguf", "clip-tuned.gguf"}
    assert "unreadable.gguf is damaged: it ends in the middle of its header" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("repo", "files", "tags"),
    [
        ("u/m", ["M-BF16.gguf", "M-F16.gguf"], {"F16": 1, "f16": 1, "BF16": 0}),
        ("u/m", ["M-IQ4_0.gguf", "M-Q4_0.gguf"], {"Q4_0": 1, "iq4_0": 0}),
        ("u/m", ["M-Compact.gguf", "M-I-Compact.gguf"], {"M-Compact.gguf": 0, "I-Compact": 1}),
        ("u/m", ["M-UD-Q4_K_XL.gguf", "M-Q4_K_M.gguf"], {"UD-Q4_K_XL": 0, "q4_k_xl": 0}),
        ("u/x", ["M-UD-Q4_K_M.gguf", "M-Q4_K_M.gguf", "M-Q4_K_M-fixed.gguf"], {"Q4_K_M": 1, "fixed": 2}),
        ("u/x", ["Q6_K/M-00001-of-00002.gguf", "BF16/M-BF16-00001-of-00009.gguf"], {"Q6_K": 0, "bf16": 1}),
        ("u/Q", ["IQ2_KS/Q-00001-of-00002.gguf", "smol-IQ2_KS/Q-00001-of-00002.gguf"], {"smol-IQ2_KS": 1}),
        ("u/Model-Q4_K_M-GGUF", ["model-q4_k_m.gguf"], {"Q4_K_M": 0}),
        ("u/X-i1-GGUF", ["X.i1-IQ3_M.gguf", "X.i1-Q4_K_M.gguf"], {"Q4_K_M": 1, "i1-Q4_K_M": 1}),
        ("u/x", ["m-q4_0.gguf", "m-Q4_0.gguf"], {"q4_0": 0, "Q4_0": 1}),
        ("u/x", ["m.gguf", "sub/m.gguf"], {"m.gguf": 0, "sub/m.gguf": 1}),
        ("u/m", ["m.gguf", "m-v2.gguf"], {"m.gguf": 0, "v2": 1, "m-v2.gguf": 1}),
    ],
)
def test_a_tag_names_one_model(repo: str, files: list[str], tags: dict[str, int]) -> None:
    assert {tag: the_one(repo, files, tag) for tag in tags} == {tag: files[i] for tag, i in tags.items()}
    assert [the_one(repo, files, label(file, files)) for file in files] == files


@pytest.mark.parametrize(
    ("files", "tag", "message"),
    [
        (["M-UD-Q4_K_XL.gguf", "M-UD-Q2_K_XL.gguf"], "XL", "has no XL; it has UD-Q4_K_XL, UD-Q2_K_XL"),
        (["M-Q4_K_M.gguf", "M-Q4_K_S.gguf"], "Q4_K", "has no Q4_K; it has Q4_K_M, Q4_K_S"),
        (["M-IQ4_0.gguf"], "Q4_0", "has no Q4_0; it has IQ4_0"),
        (["M-UD-Q4_0.gguf", "M-UD-Q2_K.gguf"], "UD", "names several models; give one of UD-Q4_0, UD-Q2_K"),
        (["a-F16.gguf", "b-F16.gguf"], "F16", "names several models; give one of a-F16.gguf, b-F16.gguf"),
        (["1/M-F16.gguf", "2/M-F16.gguf"], "f16", "give one of 1/M-F16.gguf, 2/M-F16.gguf"),
    ],
)
def test_a_tag_that_names_none_or_several_lists_the_choices(files: list[str], tag: str, message: str) -> None:
    with pytest.raises(HobbitError, match=message):
        the_one("u/m", files, tag)


def test_before_and_after_the_download_a_tag_is_the_same_model(tmp_path: Path) -> None:
    names = ["M-BF16.gguf", "M-F16.gguf", "M-IQ4_0.gguf", "M-Q4_0.gguf", "M-I-Compact.gguf", "M-Compact.gguf"]
    names += ["M-mtp-Q6_K.gguf", "UD-Q4_K_XL/M-UD-Q4_K_XL-00001-of-00001.gguf"]
    files = {name: gguf(name) for name in ["mtp-M-Q8_0.gguf", "mmproj-F16.gguf", *names]}
    tags = ["bf16", "F16", "IQ4_0", "Q4_0", "I-Compact", "M-Compact.gguf", "Q6_K", "Q4_K_XL"]
    with serving(Hub({"user/m": files})) as hub, at(hub.endpoint):
        for tag, name in zip(tags, names, strict=True):
            path = fetch(f"user/m:{tag}", cache=tmp_path)
            assert path.read_bytes() == files[name]
            assert [model.path for model in downloaded_models(tmp_path)] == [path]
            (listed,) = downloaded_models(tmp_path)
            assert repository_in(listed.name) == listed.name
            assert fetch(listed.name, cache=tmp_path) == path
            assert remove(f"user/m:{tag}", tmp_path)[0] == [name]
        with pytest.raises(HobbitError, match="has no Q8_0; it has"):  # the draft's
            fetch("user/m:Q8_0", cache=tmp_path)
        draft = fetch("user/m:mtp-M-Q8_0.gguf", cache=tmp_path)
        assert draft.read_bytes() == files["mtp-M-Q8_0.gguf"]
        assert remove("user/m:mtp-M-Q8_0.gguf", tmp_path)[0] == ["mtp-M-Q8_0.gguf"]
        for tag in ("BF16", "F16"):
            fetch(f"user/m:{tag}", cache=tmp_path)
        assert remove("user/m:F16", tmp_path)[0] == ["M-F16.gguf"]
        snapshot = next(tmp_path.rglob("M-BF16.gguf")).parent
        for file in ("config.json", "M-Q6_K-00001-of-00002.gguf", "M-Q6_K-00002-of-00003.gguf"):
            (snapshot / file).write_bytes(b"GGUF")
        for tag in (
            "Q4_0",
            "Q6_K",
            "config.json",
            "M-Q6_K-00001-of-00002.gguf",
            "M-Q6_K-00002-of-00003.gguf",
        ):
            with pytest.raises(HobbitError, match="has not been downloaded"):
                remove(f"user/m:{tag}", tmp_path)


@pytest.mark.parametrize("name", ["user/m:a-F16.gguf", "user/m:Q4/M-Q4_0.gguf", "user/m:UD-Q4_K_XL"])
def test_every_listed_name_is_that_of_a_repository(name: str) -> None:
    assert repository_in(name) == name
