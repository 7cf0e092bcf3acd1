# SPDX-License-Identifier: MIT
"""MODEL.toml: a model's own options, and what comes before them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hobbits import open_model

from pyhobbit.cli import serve, verbs
from pyhobbit.cli.main import main
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.options_file import KINDS, read_options, write_options
from pyhobbit.quality import calibration
from pyhobbit.settings.config import SAMPLING_HELP, CalibrationConfig
from pyhobbit.settings.table import OPTIONS


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "m-00001-of-00002.gguf"


def _write(model: Path, text: str) -> None:
    model.with_name("m.toml").write_text(text, "utf-8")


def test_every_setting_but_files_can_be_kept() -> None:
    files = {name for name, specs in OPTIONS.items() if specs[0].kind == "path"}
    assert set(OPTIONS) - set(KINDS) == files == {"sidecar", "timeline", "trace"}
    assert set(SAMPLING_HELP) < set(KINDS)


def test_what_is_written_is_read_and_the_rest_of_the_file_stays(model: Path) -> None:
    assert read_options(model) == {}
    _write(model, '# mine\nmemory = "1G"  # of 16\ndevice-memory = 1000\n')
    write_options(model, {"ctx": 100, "weights": (0.5, 0.25, 0.25, 0.0), "system": 'say "no"', "t1": 0.5})
    text = model.with_name("m.toml").read_text("utf-8")
    assert text.startswith('# mine\nmemory = "1G"  # of 16\n')
    options = read_options(model)
    expected = {"memory": 1 << 30, "device_memory": 1000, "ctx": 100, "t1": 0.5, "system": 'say "no"'}
    assert options == {**expected, "weights": (0.5, 0.25, 0.25, 0.0)}
    write_options(model, {"price": 0.5})
    del options["t1"]  # price is of another rule
    assert read_options(model) == {**options, "price": 0.5}


def test_options_with_a_dash_are_changed(model: Path) -> None:
    _write(model, "top-k = 5\nprefetch-bar = 0.5\n")
    write_options(model, {"top_k": 6})
    assert model.with_name("m.toml").read_text("utf-8") == "top-k = 6\nprefetch-bar = 0.5\n"


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ((), {"memory", "t1", "t2", "weights", "temp"}),
        (("temp",), {"memory", "t1", "t2", "weights"}),
        (("pools",), {"t1", "t2", "weights", "temp"}),
        (("device_memory",), {"memory", "t1", "t2", "weights", "temp"}),
        (("price",), {"memory", "weights", "temp"}),
        (("t2",), {"memory", "weights", "temp"}),
        (("quality",), {"memory", "weights", "temp"}),
        (("policy",), {"memory", "t1", "t2", "weights", "temp"}),
    ],
)
def test_what_is_given_comes_before_the_file(given: tuple[str, ...], left: set[str], model: Path) -> None:
    _write(model, 'memory = "1G"\nt1 = 0.5\nt2 = 0.6\nweights = [1, 0, 0, 0]\ntemp = 1\n')
    assert set(read_options(model, given)) == left


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('memori = "8G"', "there is no option memori; did you mean memory?"),
        ("xyzzy = 1", "there is no option xyzzy; there are memory, "),
        ("trace = 'a.csv'", "there is no option trace"),
        ("memory = 8.5", 'memory is 8.5; it must be a size like "8G"'),
        ("memory = '8 apples'", "'8 apples' is not a size"),
        ("temp = '1'", "temp is '1'; it must be a number"),
        ("top_k = true", "top_k is True; it must be a whole number"),
        ("temp = -1", "temp is -1; it must be 0 (greedy) or more"),
        ("system = 5", "system is 5; it must be a text"),
        ("think = 'maybe'", "'maybe'; choose one of on, off, hide"),
        ("max_tokens = 0", "is 0; it must be positive"),
        ("ctx = -1", "is -1; it must be positive"),
        ("policy = 'lur'", "policy is 'lur'; choose one of"),
        ("weights = [1]", "weights has 1 numbers; give 4"),
        ("weights = ['a', 0, 0, 0]", "it must be a number"),
        ("t1 = 0.9\nt2 = 0.5", "hobbit.t1 (0.9) must not be above hobbit.t2 (0.5)"),
        (
            "quality = 'fast'\nt1 = 0.5",
            "hobbit.quality chooses the rule and its numbers, and hobbit.t1 is given",
        ),
        ("quality = 'quick'", "quality is 'quick'; choose one of lossless, small-loss, fast"),
        ("[cache]\nt1 = 0.9", "there is no option cache"),
        ("memory =", "is not TOML"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_it(text: str, message: str, model: Path) -> None:
    _write(model, text)
    with pytest.raises(ConfigError) as error:
        read_options(model)
    assert message in str(error.value)
    assert str(model.with_name("m.toml")) in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError):
        write_options(model, {"seed": 1})
    assert model.with_name("m.toml").read_text("utf-8") == text


def test_a_folder_that_cannot_be_written_is_one_sentence() -> None:
    with pytest.raises(HobbitError, match=r"/nowhere/m.toml cannot be written: No such file"):
        write_options(Path("/nowhere/m.gguf"), {"seed": 1})


#
# readers of the file
#


@pytest.fixture
def tiny(tiny_gguf: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_gguf, tmp_path / "tiny.gguf"))


def _rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, tuple[Any, str, str]]:
    assert main(["config", *map(str, arguments), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["settings"]
    return {row["name"]: (row["value"], row["source"], row["note"]) for row in rows}


def test_config_writes_and_shows_it(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(tiny), "--write", "--pools", "6M", "--temp", "0.5", "--think", "hide"]) == 0
    assert f"{tiny.with_suffix('.toml')} keeps think, temp, pools" in capsys.readouterr().err
    rows = _rows(capsys, tiny, "--think", "on", "--seed", 3)
    assert rows["pools"] == (6 << 20, "options", "tiny.toml")
    assert rows["temp"] == (0.5, "options", "tiny.toml")
    assert rows["think"] == ("on", "flag", "")
    assert (rows["seed"], rows["top_k"][1]) == ((3, "flag", ""), "default")
    for arguments in ((str(tiny),), ("--seed", "1")):
        assert main(["config", "--write", *arguments]) == 2
    assert "--write keeps options for a model; name it" in capsys.readouterr().err


def test_chat_says_what_it_takes_from_it(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.with_suffix(".toml").write_text('pools = "6M"\nmax_tokens = 2\ntemp = 0\nctx = 64\n', "utf-8")
    stats = tiny.with_name("stats.json")
    assert main(["chat", str(tiny), "-p", "def f(", "--stats-json", str(stats), "--ctx", "128"]) == 0
    assert "pyhobbit: tiny.toml sets pools, max_tokens, temp\n" in capfd.readouterr().err
    document = json.loads(stats.read_text("utf-8"))
    assert document["generated_tokens"] == 2
    assert document["n_ctx"] == 128


def test_hobbit_takes_it_where_no_keyword_does(tiny: Path) -> None:
    tiny.with_suffix(".toml").write_text('pools = "6M"\nctx = 300\nthreads = 1\ntemp = 0\n', "utf-8")
    with open_model(tiny, pools=None, n_ctx=512) as model:
        assert model.cache_config.pools == 6 << 20
        assert (model.n_ctx(), model.n_threads) == (512, 1)
    with open_model(tiny, memory="4G", pools=None) as model:  # the process of the tests may hold more than 1G
        assert (model.cache_config.memory, model.cache_config.pools) == (4 << 30, None)


def test_serve_passes_on_what_is_llama_servers(tiny: Path) -> None:
    tiny.with_suffix(".toml").write_text(
        'memory = "1G"\nctx = 300\ntop_k = 3\nseed = 1\nsystem = "x"\n', "utf-8"
    )
    args = serve.parse(verbs.parser_of("serve"), [str(tiny), "--seed", "7"])
    own = serve._add_model_options(args, tiny)
    assert own == ["memory", "ctx", "top_k", "system"]
    assert serve.cache_config(args).memory == 1 << 30
    assert args.passed_on == ["--seed", "7", "--ctx-size", "300", "--top-k", "3"]


def test_calibrate_takes_what_means_the_same_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the context, which is that of a conversation, nor a rule, which calibration finds."""
    path = tmp_path / "m.gguf"
    _write(path, 'memory = "2G"\nthreads = 3\nctx = 4000\nrule = "gate"\ntemp = 0.5\n')
    seen: list[CalibrationConfig] = []

    def calibrate(_model: Path, _text: Path, config: CalibrationConfig) -> None:
        seen.append(config)
        raise HobbitError("enough")

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    for given in ((), ("--memory", "1G")):
        assert main(["calibrate", str(path), "--text", "a.txt", *given]) == 1
    assert "m.toml sets memory, threads" in capsys.readouterr().err
    assert [each.engine.cache.memory for each in seen] == [2 << 30, 1 << 30]
    assert {(each.engine.n_threads, each.engine.n_ctx, each.rule) for each in seen} == {(3, None, "price")}
