# SPDX-License-Identifier: MIT
"""The errors that a user can do something about."""

from collections.abc import Iterable


class HobbitError(Exception):
    """One sentence for the user: what is wrong and what to do. Shown without a traceback, exit status 1."""


class ComputeError(HobbitError, RuntimeError):
    """A computation that failed. A RuntimeError too, which llama_cpp.Llama raises then."""


class LoadError(HobbitError):
    """A file that this build cannot load as a model."""


class ConfigError(HobbitError, ValueError):
    """A setting that cannot be; shown as a usage error, exit status 2."""


class ContextError(HobbitError, ValueError):
    """A prompt that is longer than the model's context. A ValueError too, as llama_cpp.Llama's."""


def did_you_mean(word: str, known: Iterable[str], otherwise: str, likeness: float = 0.6) -> str:
    """The end of an error about an unknown word: the known one that is nearest, or else `otherwise`."""
    from difflib import get_close_matches  # takes a while, and few programs fail

    near = get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f"did you mean {near[0]}?" if near else otherwise
