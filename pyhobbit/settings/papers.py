# SPDX-License-Identifier: MIT
"""The configurations of papers, by name: options of the expert cache with each paper's own values.

The engine knows none of them: each is a choice of its settings. docs/systems.md has the mechanisms behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyhobbit.errors import ConfigError


@dataclass(frozen=True)
class Paper:
    """A paper. needs: beside the settings, for people.  settings: by option, without what is left open."""

    needs: str
    settings: Mapping[str, Any]


PAPERS: Mapping[str, Paper] = {
    "hobbit": Paper(
        "a low tier",  # its thresholds are those of Mixtral-8x7B, section 3.2
        {"rule": "gate", "t1": 0.6, "t2": 0.9, "policy": "hobbit", "predictor": "router"},
    ),
    "edgemoe": Paper(
        "a low tier and pyhobbit calibrate --rule edgemoe",
        {"rule": "edgemoe", "policy": "edgemoe", "predictor": "paths-exact", "prefetch": 1},
    ),
    "mobile": Paper("nothing else", {"rule": "rank", "confidence": 0.7, "predictor": "router"}),
    "twiddler": Paper(
        "a GPU and a calibration", {"t1": 1.0, "mode": "twiddler", "policy": "static", "prefetch": 0}
    ),
    "daop": Paper(
        "a GPU",
        {
            "t1": 1.0,
            "mode": "cooperative",
            "policy": "prompt",
            "predictor": "router",
            "prefetch": 1,
            "early": True,
            "degrade": True,
        },
    ),
}

PAPER_HELP = f"set a paper's configuration: {', '.join(PAPERS)}; options given beside it come first"
"""Help for users."""


def settings_of(paper: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a paper that are not given, by option. given: values by option, None for none.

    Raises ConfigError for an unknown name.
    """
    if paper not in PAPERS:
        raise ConfigError(f"there is no paper '{paper}'; choose one of {', '.join(PAPERS)}")
    return {name: value for name, value in PAPERS[paper].settings.items() if given.get(name) is None}


def paper_text(paper: str, chosen: Mapping[str, Any]) -> str:
    """One line for people. chosen: by settings_of()."""
    sets = ", ".join(f"{name} {str(value).lower()}" for name, value in chosen.items()) or "nothing"
    kept = [name for name in PAPERS[paper].settings if name not in chosen]
    left = f"; {', '.join(kept)} as given" if kept else ""
    return f"--paper {paper} sets {sets}{left}; it needs {PAPERS[paper].needs}"
