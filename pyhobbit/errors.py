# SPDX-License-Identifier: MIT
"""The errors that a user can do something about."""


class HobbitError(Exception):
    """One sentence for the user: what is wrong and what to do. Shown without a traceback, exit status 1."""


class ConfigError(HobbitError, ValueError):
    """A setting that cannot be; shown as a usage error, exit status 2."""


class ContextError(HobbitError, ValueError):
    """A prompt that is longer than the model's context. A ValueError too, as llama_cpp.Llama's."""
