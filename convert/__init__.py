# SPDX-License-Identifier: MIT
"""Makes a multi-precision GGUF (docs/format.md) of a mixture-of-experts model."""

# This folder is installed as pyhobbit.convert. make_gguf has the command, pipeline its steps.
from pyhobbit.convert.make_gguf import add_arguments, run

__all__ = ["add_arguments", "run"]
