# SPDX-License-Identifier: MIT
"""The number of options, and --set, which takes the settings that only studies need."""

from pathlib import Path

import pytest

from pyhobbit.cli import verbs
from pyhobbit.cli.help import Parser
from pyhobbit.cli.main import main
from pyhobbit.cli.options import add_setting_arguments, cache_config


def test_there_are_few_options() -> None:
    actions = [each for verb in verbs._VERBS for each in verbs.parser_of(verb).declared]
    names = {name for each in actions for name in each.option_strings}
    assert len(names) <= 70, sorted(names)


@pytest.mark.parametrize(
    "verb", ["bench", "chat", "config", "inspect", "serve", "simulate", "calibrate", "convert"]
)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("t3=1", "--set has no key t3; "),
        ("memory=1G", "--set has no key memory; --memory is an option of its own"),
    ],
)
def test_set_refuses_other_keys(
    verb: str, given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("--trace", "x", "--capacity", "1") if verb == "simulate" else ("m.gguf",)
    assert main([verb, *own, "--set", given]) == 2
    assert f"error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("t1=much", "--set t1 needs a value F, as in t1=F, not 'much'"),
        ("t1", "--set t1 needs a value F, as in t1=F, not ''"),
        ("strict=maybe", "--set strict needs a value true|false, as in strict=true|false, not 'maybe'"),
        ("hobbit.rule=best", "rule is 'best'; choose one of "),
        ("low-share=2", "low_share is 2.0; it must lie between 0 and 1"),
        ("prefetchbar=1", "--set has no key prefetchbar; did you mean prefetch_bar?"),
    ],
)
def test_set_refuses_other_values(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", given]) == 2
    assert message in capsys.readouterr().err


def test_set_takes_a_value_of_each_kind() -> None:
    parser = Parser()
    add_setting_arguments(parser)
    words = ("t1=0.5", "io-threads=3", "strict=true", "mode=gpu", "weights=1,0,0,0", "hobbit.timeline=t.json")
    config = cache_config(parser.parse_args([word for each in words for word in ("--set", each)]))
    assert (config.t1, config.io_threads, config.strict, config.mode) == (0.5, 3, True, "gpu")
    assert (config.weights, config.timeline) == ((1, 0, 0, 0), Path("t.json"))
