# SPDX-License-Identifier: MIT
"""Writes the C source of pyhobbit._hobbit_c: python build.py HEADER OUT.c (run by CMake)."""

import argparse
import re
from pathlib import Path

from cffi import FFI


def declarations(header: str) -> str:
    """The plain C declarations of hobbit.h: no preprocessor lines, linkage blocks or export macros."""
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", header, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\bHOBBIT_API\b", "", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("header", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    builder = FFI()
    builder.cdef(declarations(args.header.read_text(encoding="utf-8")))
    builder.set_source("pyhobbit._hobbit_c", f'#include "{args.header.name}"')
    builder.emit_c_code(str(args.output))


if __name__ == "__main__":
    main()
