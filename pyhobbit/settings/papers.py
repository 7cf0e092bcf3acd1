# SPDX-License-Identifier: MIT
"""The configurations of papers, which their mechanisms register; docs/systems.md describes these."""

from collections.abc import Mapping
from typing import Any

from pyhobbit._tables import PAPERS
from pyhobbit.errors import ConfigError
from pyhobbit.native.devices import gpus

PAPER_HELP = f"set a paper's configuration: {', '.join(PAPERS)}; options given beside it come first"
"""Help for users."""


def settings_of(paper: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A paper's settings, by option, without those given (None: not given) and, where all is in
    the host's memory, a mode that needs more. Raises ConfigError."""
    if paper not in PAPERS:
        raise ConfigError(f"there is no paper '{paper}'; choose one of {', '.join(PAPERS)}")
    own, device = PAPERS[paper], given.get("device")
    shares = {"CPU": True, **{each.name: each.is_integrated for each in gpus()}}  # the host's memory
    is_apart = "GPU" in own.needs or not (all(shares.values()) if device is None else shares.get(device))
    left = {name: value for name, value in own.settings.items() if given.get(name) is None}
    return {name: value for name, value in left.items() if is_apart or name != "mode"}


def paper_text(paper: str, chosen: Mapping[str, Any]) -> str:
    """One line for people. chosen: by settings_of()."""
    sets = ", ".join(f"{name} {str(value).lower()}" for name, value in chosen.items()) or "nothing"
    kept = [name for name in PAPERS[paper].settings if name not in {*chosen, "mode"}]
    left = f"; {', '.join(kept)} as given" if kept else ""
    return f"--paper {paper} sets {sets}{left}; it needs {PAPERS[paper].needs}"
