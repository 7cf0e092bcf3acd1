# SPDX-License-Identifier: MIT
"""Builds the reference of the Python package from its docstrings: python docs/reference.py FOLDER.

Needs pdoc: pip install pdoc.
"""

import sys
from pathlib import Path

import pdoc

import pyhobbit


def main(folder: Path) -> None:
    # pdoc looks for names in the module's dictionary, where the package puts none before they are used
    for name in pyhobbit.__all__:
        setattr(pyhobbit, name, getattr(pyhobbit, name))
    pdoc.render.configure(docformat="markdown", show_source=False)
    pdoc.pdoc("pyhobbit", "llama_cpp.llama", output_directory=folder)  # the latter for what Hobbit inherits
    print(f"{folder / 'pyhobbit.html'}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/reference.py FOLDER")
    main(Path(sys.argv[1]))
