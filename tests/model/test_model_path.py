# SPDX-License-Identifier: MIT
import argparse
from pathlib import Path

import pytest

from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.gguf_file import pack_header, string_entry
from pyhobbit.model.model_path import add_model_arguments, check_model_arguments, model_path
from pyhobbit.model.names import check_model_file, repository_in


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    return parser.parse_args(arguments)


def test_a_path_is_taken_as_it_is() -> None:
    assert model_path(_parse("some/m.gguf")) == Path("some/m.gguf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a MODEL"),
        (["m.gguf", "-hf", "a/b"], "both MODEL"),
        (["-hf", "ab"], "'ab' is not a repository"),
        (["-hf", "a/b:c:d"], "'a/b:c:d' is not a repository"),
    ],
)
def test_exactly_one_model_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_path(_parse(*arguments))


def test_without_a_model_those_of_this_folder_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"those that are here; {tmp_path} holds m.gguf$"):
        model_path(_parse())


def _error(path: Path) -> str:
    with pytest.raises(HobbitError) as error:
        check_model_file(path)
    return str(error.value)


def test_what_is_in_the_folder_is_suggested(tmp_path: Path) -> None:
    for name in ("Mixtral-Q4_K_M.gguf", "Qwen3-Q8_0.gguf", "Qwen3-Q8_0.hobbit.gguf", "notes.txt"):
        (tmp_path / name).write_bytes(b"GGUF")
    near = _error(tmp_path / "mixtral-q4_k_m.gguf")
    assert near.endswith(f"does not exist; did you mean {tmp_path}/Mixtral-Q4_K_M.gguf?")
    assert f"did you mean {tmp_path}/Qwen3-Q8_0.gguf?" in _error(tmp_path / "Qwen3-Q8_0")
    known = "holds Mixtral-Q4_K_M.gguf, Qwen3-Q8_0.gguf"
    (tmp_path / "olmoe.gguf").symlink_to("gone.gguf")  # no alternative
    assert _error(tmp_path / "olmoe.gguf").endswith("is a link to a file that is gone; pull it again")
    assert _error(tmp_path).endswith(f"is a folder; give a GGUF file; {tmp_path} {known}")
    assert "is not a GGUF file" in _error(Path(__file__))
    check_model_file(tmp_path / "Mixtral-Q4_K_M.gguf")


def test_a_checkpoint_is_to_be_converted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert f"pyhobbit convert {tmp_path}" in _error(tmp_path)


@pytest.mark.parametrize(("kind", "what"), [("sidecar", "further tiers"), ("calibration", "settings")])
def test_a_companion_is_known_by_its_header(kind: str, what: str, tmp_path: Path) -> None:
    entry = string_entry("general.architecture", f"hobbit-{kind}")
    (tmp_path / "m.gguf").write_bytes(pack_header([entry], [], 32))
    assert _error(tmp_path / "m.gguf").endswith(f"is no model but holds only {what} of one; give the model")


@pytest.mark.parametrize(
    ("key", "value"), [("architecture", "clip"), ("type", "mmproj"), ("type", "imatrix")]
)
def test_what_comes_with_a_model_is_none(key: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(pack_header([string_entry(f"general.{key}", value)], [], 32))
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    assert "m.gguf is no model but comes with one, like a projector for" in _error(tmp_path / "m.gguf")
    assert _error(tmp_path).endswith(f"{tmp_path} holds m.gguf")


def test_a_folder_that_is_not_there_is_named() -> None:
    assert _error(Path("none/m.gguf")) == "none/m.gguf does not exist, nor does the folder none"


@pytest.mark.parametrize(
    ("model", "repository"),
    [
        ("user/Model-GGUF", "user/Model-GGUF"),
        ("user/Model-GGUF:Q8_0", "user/Model-GGUF:Q8_0"),
        ("hf.co/user/Model-GGUF:Q8_0", "user/Model-GGUF:Q8_0"),
        ("huggingface.co/user/Model", "user/Model"),
        ("https://huggingface.co/user/Model-GGUF/", "user/Model-GGUF"),
        ("https://huggingface.co/user/Model-GGUF?library=transformers#files", "user/Model-GGUF"),
        ("m.gguf", None),
        ("folder/m.gguf", None),
        ("/models/m", None),
        ("./user/m", None),
        ("../m", None),
        ("~/m", None),
        ("a/b/c", None),
        ("here/m", None),
    ],
)
def test_a_repository_is_told_from_a_file(
    model: str, repository: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert repository_in(model) == repository
    args = _parse(model)
    check_model_arguments(args)
    expected = (None, repository) if repository else (Path(model), None)
    assert (args.model, args.hf_repo) == expected
    check_model_arguments(args)
    assert (args.model, args.hf_repo) == expected
    if repository is not None:
        args = _parse("-hf", model)
        check_model_arguments(args)
        assert args.hf_repo == repository


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("https://example.com/m.gguf", "is not an address on Hugging Face"),
        ("https://huggingface.co/user", "is not the page of a model; write USER/NAME"),
        ("https://huggingface.co/user/M/blob/main/M.gguf", "is not the page of a model"),
    ],
)
def test_an_address_that_names_no_model_is_refused(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        repository_in(model)
