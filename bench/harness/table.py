# SPDX-License-Identifier: MIT
"""Tables of Markdown, and that of a comparison: medians and ratios of its lines of JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from bench.harness.arms import DEMAND, kind

Record = Mapping[str, Any]
Figure = Callable[[Record], float | None]
Key = tuple[float | None, str]
"""Limit, None where there is none, and arm."""

_BESIDE = ("stock", "stock-128k", "stock-repacked")  # stock means the better of them
# figures of a record, with their format and factor
OWN = {
    "hits": ("hit_rate", ".1%", 1),
    "by the CPU": ("cpu_share", ".0%", 1),
    "MB/token": ("disk_bytes_per_token", ".1f", 1e-6),
    "stall": ("stall_share", ".0%", 1),
    "disk GB/s": ("disk_bytes_per_second", ".2f", 1e-9),
    "peak MB": ("peak_bytes", ".0f", 1e-6),
    "token, ms": ("token_ms", ".2f", 1),
    "beside, us/layer": ("layer_beside_us", ".0f", 1),
}
# counters to be divided, format, and factor; n_decoded counts tokens
_ON_A_DEVICE = {
    **{f"{name}/layer": (f"device_{name}", "layers_computed", ".1f", 1)
       for name in ("launches", "waits", "reads", "copies")},
    "MB/token moved": ("bytes_transferred", "n_decoded", ".1f", 1e-6),
    "GB/s": ("bytes_transferred", "transfer_s", ".2f", 1e-9),
}  # fmt: skip
# of a modelled machine
_GROUPS = {
    "per_layer": ("{}/layer", ".1f"),
    "idle_us": ("{} idle, us", ".0f"),
}


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


def number(value: float | None, how: str, scale: float = 1.0) -> str:
    """A cell; a dash where there is none."""
    return "-" if value is None else format(value * scale, how)


def _get(name: str) -> Figure:
    return lambda record: record.get(name)


def _by(over: str, under: str) -> Figure:
    """A counter by another; None where the arm has none of them."""

    def ratio(record: Record) -> float | None:
        values = {**record.get("counters", {}), "n_decoded": record.get("n_decoded", 0)}
        return values[over] / values[under] if over in values and values.get(under) else None

    return ratio


_SPEED = _get("tokens_per_second")


class Results:
    """The repetitions of a run by limit and arm. order: of these in the run."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.run = records[0]
        self.has_device = "source" in self.run
        self._all: dict[Key, list[Record]] = {}
        for record in records[1:]:
            self._all.setdefault((record["limit"], record["arm"]), []).append(record)
        self.order = list(self._all)
        self._good = {key: [r for r in group if "error" not in r] for key, group in self._all.items()}

    def errors(self) -> list[str]:
        """Errors, without repetitions."""
        failed = (r for group in self._all.values() for r in group if "error" in r)
        at = {limit: "" if limit is None else f" at {limit:.0%}" for limit, _ in self._all}
        return list(dict.fromkeys(f"{r['arm']}{at[r['limit']]}: {r['error']}" for r in failed))

    def median(self, key: Key, figure: Figure) -> float | None:
        """Over the repetitions that have this figure."""
        values = [value for r in self._good.get(key, []) if (value := figure(r)) is not None]
        return median(values) if values else None

    def _to_stock(self, key: Key, better: Callable[..., float], figure: Figure) -> float | None:
        """The arm's figure by that of stock under the same limit."""
        names = ("stock",) if key[0] is None and not self.has_device else _BESIDE
        keys = [(limit, arm) for limit, arm in self._all if limit == key[0] and kind(arm) in names]
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
        n_failed = len(self._all[key]) - len(speeds)
        speed = self.median(key, _SPEED)
        figures = {
            "source": self.run.get("source", "-"),
            "device memory" if self.has_device else "memory": "all" if limit is None else f"{limit:.0%}",
            "arm": arm + (f" ({n_failed} failed)" if n_failed else ""),
            "token/s": number(speed, ".2f"),
            "least - most": f"{min(speeds):.2f} - {max(speeds):.2f}" if speeds else "-",
            "kept": self._ratio(speed, (None, "stock"), ".0%"),
            "to stock": number(self._to_stock(key, max, _SPEED), ".2f"),
            "to demand": self._ratio(speed, (None, DEMAND), ".2f"),
            **{f"first token, {n}": self._first_token(key, str(n)) for n in self.run["options"]["prompts"]},
        }
        for name, figure, how, scale in self._columns():
            figures[name] = number(self.median(key, figure), how, scale)
        for record in self._good[key][:1]:  # a modelled machine repeats itself
            for group, (title, how) in _GROUPS.items():
                own = record.get(group, {})
                figures |= {title.format(name): number(value, how) for name, value in own.items()}
        return {name: cell for name, cell in figures.items() if cell != "-"}

    def _ratio(self, speed: float | None, to: Key, how: str) -> str:
        base = self.median(to, _SPEED)
        return number(speed / base if speed is not None and base else None, how)

    def _columns(self) -> Iterator[tuple[str, Figure, str, float]]:
        yield from ((title, _get(name), how, scale) for title, (name, how, scale) in OWN.items())
        device = _ON_A_DEVICE if self.has_device else {}
        yield from ((name, _by(of, by), how, scale) for name, (of, by, how, scale) in device.items())

    def _first_token(self, key: Key, prompt: str) -> str:
        def took(record: Record) -> float | None:
            return record.get("ttft_s", {}).get(prompt)

        seconds = self.median(key, took)
        n_bytes = self.median(key, lambda record: record.get("ttft_bytes", {}).get(prompt))
        if seconds is None or n_bytes is None:
            return "-"
        ratio = self._to_stock(key, min, took)
        return f"{seconds:.2f} s, {n_bytes / 1e9:.2f} GB" + (f" ({ratio:.2f})" if ratio is not None else "")


def table(results: Results) -> str:
    """The run and its rows, as tables of Markdown."""
    head = [{"run": name, "": _text(value)} for name, value in results.run.items() if value is not None]
    return "\n".join([*markdown(head), "", *markdown([results.cells(key) for key in results.order])])


def _text(value: Any) -> str:
    items = value.items() if isinstance(value, Mapping) else ()
    return ", ".join(f"{name}: {each}" for name, each in items) or str(value)
