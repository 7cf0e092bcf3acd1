# SPDX-License-Identifier: MIT
"""Makes a multi-precision GGUF (docs/format.md) of a mixture-of-experts model."""

# This folder is installed as pyhobbit.convert, as wheel.packages in pyproject.toml says. Code that it shares
# with other folders, such as the reader of GGUF files, lies in pyhobbit/model/. make_gguf.py has the options,
# pipeline.py the steps.
from pyhobbit.convert.make_gguf import add_arguments, run

__all__ = ["add_arguments", "run"]
