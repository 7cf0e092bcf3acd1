# SPDX-License-Identifier: MIT
"""Builds the reference of the Python package: python docs/reference.py FOLDER. Needs pdoc."""

import sys
from pathlib import Path

import pdoc

import pyhobbit

if __name__ == "__main__":
    # pdoc looks for names in the module's dictionary, where the package puts none before they are used
    for name in pyhobbit.__all__:
        setattr(pyhobbit, name, getattr(pyhobbit, name))
    pdoc.render.configure(docformat="markdown", show_source=False)
    pdoc.pdoc("pyhobbit", "llama_cpp.llama", output_directory=Path(sys.argv[1]))
