# SPDX-License-Identifier: MIT
"""Tables of Markdown, and that of a comparison: medians and ratios of its lines of JSON."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.harness.arms import DEMAND, kind

Record = Mapping[str, Any]
Key = tuple[float | None, str]
"""Limit, None where there is none, and arm."""

_BESIDE = ("stock", "stock-128k", "stock-repacked")  # stock means the better of them
# figures of a record, with their format and factor; GROUP.NAME is a figure of a group
_OWN: Mapping[str, tuple[str, str, float]] = {
    "hits": ("hit_rate", ".1%", 1),
    "by the CPU": ("cpu_share", ".0%", 1),
    "MB/token": ("disk_bytes_per_token", ".1f", 1e-6),
    "stall": ("stall_share", ".0%", 1),
    "disk GB/s": ("disk_bytes_per_second", ".2f", 1e-9),
    "peak MB": ("peak_bytes", ".0f", 1e-6),
    "token, ms": ("token_ms", ".2f", 1),
    "beside, us/layer": ("layer_beside_us", ".0f", 1),
    "MB/token moved": ("moved_bytes_per_token", ".1f", 1e-6),
    "GB/s": ("moved_bytes_per_second", ".2f", 1e-9),
    **{f"{name}/layer": (f"per_layer.{name}", ".1f", 1)
       for name in ("launches", "replays", "waits", "copies", "reads")},
    **{f"{name} idle, us": (f"idle_us.{name}", ".0f", 1) for name in ("device", "link", "cpu")},
}  # fmt: skip


def markdown(table: Sequence[Mapping[str, str]]) -> list[str]:
    """The lines of a table with aligned columns, from its rows by column; a dash where a row lacks one."""
    head = list(dict.fromkeys(name for row in sorted(table, key=len, reverse=True) for name in row))
    rows = [head, *([row.get(name, "-") for name in head] for row in table)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return [lines[0], rule, *lines[1:]] if table else []


def _number(value: float | None, how: str, scale: float = 1.0) -> str:
    """A cell; a dash where there is no number."""
    return "-" if value is None else format(value * scale, how)


def _flat(record: Record) -> Record:
    """The record with figures of its groups by GROUP.NAME."""
    groups = {name: of for name, of in record.items() if isinstance(of, Mapping)}
    return {
        **record,
        **{f"{group}.{name}": each for group, of in groups.items() for name, each in of.items()},
    }


class Results:
    """The repetitions of a run by limit and arm."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.run = records[0]
        self.has_device = "source" in self.run
        self.all: dict[Key, list[Record]] = {}
        for record in records[1:]:
            self.all.setdefault((record["limit"], record["arm"]), []).append(_flat(record))
        self._good = {key: [r for r in group if "error" not in r] for key, group in self.all.items()}

    def errors(self) -> list[str]:
        """Errors, without repetitions."""
        failed = (r for group in self.all.values() for r in group if "error" in r)
        at = {limit: "" if limit is None else f" at {limit:.0%}" for limit, _ in self.all}
        return list(dict.fromkeys(f"{r['arm']}{at[r['limit']]}: {r['error']}" for r in failed))

    def median(self, key: Key, figure: str) -> float | None:
        """Over the repetitions that have this figure."""
        values = [value for r in self._good.get(key, []) if (value := r.get(figure)) is not None]
        return median(values) if values else None

    def _to_stock(self, key: Key, better: Callable[..., float], figure: str) -> float | None:
        """The arm's figure by that of stock under the same limit."""
        names = ("stock",) if key[0] is None and not self.has_device else _BESIDE
        keys = [(limit, arm) for limit, arm in self.all if limit == key[0] and kind(arm) in names]
        values = [value for each in keys if (value := self.median(each, figure)) is not None]
        own = self.median(key, figure)
        return own / better(values) if own is not None and values else None

    def cells(self, key: Key) -> dict[str, str]:
        """Medians over an arm's repetitions at one limit, by column, without those that it does not have.

        range: least - most tokens per second.  kept: share of the decode speed of stock llama.cpp with
        everything in memory.  to stock: the decode speed by that of stock under the same limit.
        first token: seconds, GB read meanwhile, and the time by stock's under the same limit, below 1 where
        this is sooner.
        """
        limit, arm = key
        speeds = [r["tokens_per_second"] for r in self._good[key]]
        n_failed = len(self.all[key]) - len(speeds)
        figures = {
            "source": self.run.get("source", "-"),
            "device memory" if self.has_device else "memory": "all" if limit is None else f"{limit:.0%}",
            "arm": arm + (f" ({n_failed} failed)" if n_failed else ""),
            "token/s": _number(self.median(key, "tokens_per_second"), ".2f"),
            "least - most": f"{min(speeds):.2f} - {max(speeds):.2f}" if speeds else "-",
            "kept": self._ratio(key, (None, "stock"), ".0%"),
            "to stock": _number(self._to_stock(key, max, "tokens_per_second"), ".2f"),
            "to demand": self._ratio(key, (None, DEMAND), ".2f"),
            **{f"first token, {n}": self._first_token(key, n) for n in self.run["options"]["prompts"]},
            **{title: _number(self.median(key, name), how, by) for title, (name, how, by) in _OWN.items()},
        }
        return {name: cell for name, cell in figures.items() if cell != "-"}

    def _ratio(self, key: Key, to: Key, how: str) -> str:
        speed, base = (self.median(each, "tokens_per_second") for each in (key, to))
        return _number(speed / base if speed is not None and base else None, how)

    def _first_token(self, key: Key, prompt: int) -> str:
        took, n_bytes = f"ttft_s.{prompt}", self.median(key, f"ttft_bytes.{prompt}")
        seconds = self.median(key, took)
        if seconds is None or n_bytes is None:
            return "-"
        ratio = self._to_stock(key, min, took)
        return f"{seconds:.2f} s, {n_bytes / 1e9:.2f} GB" + (f" ({ratio:.2f})" if ratio is not None else "")


def table(results: Results) -> str:
    """The run and its rows, as tables of Markdown."""
    head = [{"run": name, "": _text(value)} for name, value in results.run.items() if value is not None]
    return "\n".join([*markdown(head), "", *markdown([results.cells(key) for key in results.all])])


def _text(value: Any) -> str:
    items = value.items() if isinstance(value, Mapping) else ()
    return ", ".join(f"{name}: {each}" for name, each in items) or str(value)
