# SPDX-License-Identifier: MIT
"""The configurations of papers, and what is given beside them; tests/papers/ has what each paper does."""

from pathlib import Path

import pytest
from built import MECHANISMS

from pyhobbit import CacheConfig, Hobbit
from pyhobbit.cli.main import main
from pyhobbit.errors import ConfigError
from pyhobbit.model.options_file import write_options
from pyhobbit.native.devices import Gpu
from pyhobbit.settings import papers
from pyhobbit.settings.papers import PAPERS, settings_of
from pyhobbit.settings.resolve import check_settings

NEEDED = {
    "daop": {"early", "placement", "replacement"},
    "edgemoe": {"paths"},
    "hobbit": set(),
    "mobile": {"second_pass"},
    "twiddler": {"placement"},
}


@pytest.mark.parametrize("paper", NEEDED)
def test_a_paper_is_a_configuration_or_refused_where_a_mechanism_is_not_built(paper: str) -> None:
    if NEEDED[paper] <= set(MECHANISMS):
        check_settings(CacheConfig(**settings_of(paper, {})).settings())
    else:
        with pytest.raises(ConfigError, match=f"^there is no paper '{paper}'; choose one of "):
            Hobbit("m.gguf", paper=paper)


def test_there_are_no_other_papers() -> None:
    assert set(PAPERS) <= set(NEEDED)


def test_an_option_that_is_given_comes_first(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(tiny_gguf)
    write_options(model, {"policy": "lru", "io_threads": 2})
    assert main(["config", str(model), "--pools", "6M", "--paper", "hobbit", "--set", "t1=0.5"]) == 0
    shown = capsys.readouterr()
    rows = {words[0]: words[1:] for words in map(str.split, shown.out.splitlines()) if len(words) > 1}
    assert rows["t1"][:2] == ["0.5", "flag"]
    assert rows["t2"][:2] == ["0.9", "flag"]
    assert rows["policy"][:2] == ["hobbit", "flag"]
    assert rows["io_threads"][:2] == ["2", "options"]
    (line,) = (line for line in shown.err.splitlines() if "--paper" in line)
    assert line == (
        "pyhobbit: --paper hobbit sets rule gate, t2 0.9, policy hobbit, predictor router; t1 as given; "
        "it needs a low tier"
    )


def test_a_paper_sets_no_mode_that_wants_two_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (Gpu("CUDA0", "a", is_integrated=True), Gpu("CUDA1", "b"))
    for gpus, device, has_mode in (
        (found, None, True), (found, "CUDA0", False), (found, "CUDA1", True), (found, "CPU", False),
        (found, "RPC0", True), (found[:1], None, False), ((), None, False),
    ):  # fmt: skip
        monkeypatch.setattr(papers, "gpus", lambda gpus=gpus: gpus)
        assert ("mode" in papers.settings_of("hobbit", {"device": device})) == has_mode, (gpus, device)


def test_the_keyword_of_hobbit(tiny_gguf: Path) -> None:
    cache = CacheConfig(pools=6 << 20, policy="lfu")
    with Hobbit(str(tiny_gguf), paper="hobbit", cache=cache, t2=0.8, n_ctx=64, verbose=False) as llm:
        found = llm.cache_config
    assert (found.t1, found.t2, found.policy, found.predictor) == (0.6, 0.8, "lfu", "router")


@pytest.mark.parametrize("verb", ["chat", "serve", "bench", "inspect", "config"])
def test_an_unknown_paper_is_refused(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "m.gguf", "--paper", "hobit"]) == 2
    assert f"there is no paper 'hobit'; choose one of {', '.join(PAPERS)}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="there is no paper"):
        settings_of("", {})
