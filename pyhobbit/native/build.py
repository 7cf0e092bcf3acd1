# SPDX-License-Identifier: MIT
"""Writes the sources of pyhobbit._hobbit_c and pyhobbit._tables; CMake runs it."""

import argparse
import re
from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from cffi import FFI

# In the order of hobbit_setting_type: its name, the type in Python, and how a default is read.
_KINDS = (
    ("number", "float", float),
    ("count", "int", int),
    ("size", "int", int),
    ("flag", "bool", lambda text: text == "1"),
    ("choice", "str", str),
    ("text", "str", str),
    ("path", "Path", str),
)
# In the order of hobbit_counter_kind: its name, the type in Python and its zero.
_COUNTERS = (("count", "int", 0), ("seconds", "float", 0.0), ("state", "int", 0))

_HEAD = '''"""The engine's settings and counters. Generated from the tables of ggml_ext by native/build.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """What the engine knows of a setting; see struct hobbit_setting_spec in hobbit.h."""

    key: str
    option: str | None
    kind: str
    min: float
    max: float
    default: Any
    note: str | None
    choices: tuple[str, ...]
    unit: str | None
    is_stored: bool
    help: str


class Counter(NamedTuple):
    """What the engine knows of a counter; see struct hobbit_counter in hobbit.h."""

    name: str
    kind: str
    metric: str
    label: str | None
    help: str


'''


def declarations(header: str) -> str:
    """The plain C declarations of hobbit.h: no preprocessor lines, linkage blocks or export macros."""
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", header, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\bHOBBIT_API\b", "", text)


def tables(ffi: FFI, library: Any) -> str:
    """The source of pyhobbit._tables; library: has the functions that list settings and counters."""

    def text(pointer: Any) -> str | None:
        return ffi.string(pointer).decode() if pointer else None

    def rows(at: Any) -> list[Any]:
        return list(takewhile(bool, map(at, count())))

    settings, options, counters, fields = [], {}, [], []
    for spec in rows(library.hobbit_setting_spec_at):
        (kind, python_type, read), default = _KINDS[spec.type], text(spec.default_value)
        option, about, choices = text(spec.option), text(spec.help), text(spec.choices) or ""
        if kind == "choice" and not choices:
            raise SystemExit(f"{text(spec.key)} has nothing to choose from")
        bounds = (each if kind == "number" else int(each) for each in (spec.min, spec.max))
        values = (default and read(default), text(spec.default_note), tuple(choices.split()), text(spec.unit))
        settings.append((text(spec.key), option, kind, *bounds, *values, spec.is_stored, about))
        if option in options:
            options[option] = (f"tuple[{python_type}, ...]", options[option][1])
        elif option is not None:
            options[option] = (python_type, about)
    for counter in rows(library.hobbit_counter_at):
        (kind, python_type, zero), name, about = (
            _COUNTERS[counter.kind],
            text(counter.name),
            text(counter.help),
        )
        counters.append((name, kind, text(counter.metric), text(counter.label), about))
        fields.append((name, python_type, zero, about))
    lines = [
        _HEAD,
        "SETTINGS = (",
        *(f"    Setting{row!r}," for row in settings),
        ")",
        "COUNTERS = (",
        *(f"    Counter{row!r}," for row in counters),
        ")",
        *_dataclass(
            "CacheSettings", [(n, f"{kind} | None", None, about) for n, (kind, about) in options.items()]
        ),
        *_dataclass("CacheCounters", fields),
    ]
    return "\n".join(lines) + "\n"


def _dataclass(name: str, fields: Sequence[tuple[str | None, str, object, str | None]]) -> Iterator[str]:
    yield f"\n\n@dataclass(frozen=True)\nclass {name}:"
    for field, python_type, default, about in fields:
        yield f"    {field}: {python_type} = {default!r}\n    {about!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("header", "tables", "module_source", "tables_source"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    builder = FFI()
    builder.cdef(declarations(args.header.read_text(encoding="utf-8")))
    builder.set_source("pyhobbit._hobbit_c", f'#include "{args.header.name}"')
    builder.emit_c_code(str(args.module_source))
    args.tables_source.write_text(tables(builder, builder.dlopen(str(args.tables))), encoding="utf-8")


if __name__ == "__main__":
    main()
