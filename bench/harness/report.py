# SPDX-License-Identifier: MIT
"""A run's results: medians, ratios and the roof, as a table."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.harness.arms import kind
from bench.tables import markdown, number

Record = Mapping[str, Any]
Key = tuple[float | None, str]
"""Limit, None where there is none, and arm."""

_STOCK = "stock"
_RESIDENT = "ours-resident"
_MAPPED = (_STOCK, "stock-128k")  # stock under a limit means the better of them


class Results:
    """The repetitions of a run by limit and arm. order: of these in the run."""

    def __init__(self, records: Sequence[Record], stock: Sequence[str] = _MAPPED) -> None:
        """stock: the arms the better of which is compared with under a limit."""
        self.run = records[0]
        self._stock = stock
        self._all: dict[Key, list[Record]] = {}
        for record in records[1:]:
            self._all.setdefault((record["limit"], record["arm"]), []).append(record)
        self.order = list(self._all)
        self._good = {key: [r for r in group if "error" not in r] for key, group in self._all.items()}

    def errors(self) -> list[str]:
        """Errors, without repetitions."""
        failed = (r for group in self._all.values() for r in group if "error" in r)
        at = {key[0]: "" if key[0] is None else f" at {key[0]:.0%}" for key in self._all}
        return list(dict.fromkeys(f"{r['arm']}{at[r['limit']]}: {r['error']}" for r in failed))

    def bandwidth(self) -> float | None:
        """Bytes per second of direct reads, the median over the repetitions."""
        rates = [r["disk_bytes_per_second"] for group in self._all.values() for r in group]
        known = [rate for rate in rates if rate is not None]
        return median(known) if known else None

    def _of_roof(self, record: Record) -> float | None:
        """The share of the roof by the disk's speed beside this repetition."""
        resident = self.median((None, _RESIDENT), _get("tokens_per_second"))
        missed_bytes = _missed_bytes(record)
        bandwidth = record["disk_bytes_per_second"]
        if resident is None or missed_bytes is None or bandwidth is None:
            return None
        return record["tokens_per_second"] * max(1 / resident, missed_bytes / bandwidth)

    def median(self, key: Key, figure: Callable[[Record], float | None]) -> float | None:
        """Over the repetitions that have this figure."""
        values = [value for r in self._good.get(key, []) if (value := figure(r)) is not None]
        return median(values) if values else None

    def _of_stock(
        self, limit: float | None, better: Callable[..., float], figure: Callable[[Record], float | None]
    ) -> float | None:
        names = (_STOCK,) if limit is None else self._stock
        keys = [key for key in self._all if key[0] == limit and kind(key[1]) in names]
        values = [value for key in keys if (value := self.median(key, figure)) is not None]
        return better(values) if values else None

    def cells(self, key: Key) -> dict[str, str]:
        """Medians over an arm's repetitions at one limit, by column; a dash where there is no such figure.

        range: least - most tokens per second.  kept: share of the decode speed of stock llama.cpp with
        everything in memory.  to stock: the decode speed by that of stock under the same limit.
        first token: seconds, GB read meanwhile, and the time by stock's under the same limit, below 1 where
        this is sooner.  roof: share of what compute or the disk allow, whichever allows less.
        """
        limit, arm = key
        speeds = [r["tokens_per_second"] for r in self._good[key]]
        n_failed = len(self._all[key]) - len(speeds)
        of_speed = _get("tokens_per_second")
        speed = self.median(key, of_speed)
        in_memory, under_limit = self.median((None, _STOCK), of_speed), self._of_stock(limit, max, of_speed)

        def cell(name: str, how: str, scale: float = 1.0) -> str:
            return number(self.median(key, _get(name)), how, scale)

        return {
            "memory": "all" if limit is None else f"{limit:.0%}",
            "arm": arm + (f" ({n_failed} failed)" if n_failed else ""),
            "token/s": number(speed, ".2f"),
            "least - most": f"{min(speeds):.2f} - {max(speeds):.2f}" if speeds else "-",
            "kept": number(_ratio(speed, in_memory), ".0%"),
            "to stock": number(_ratio(speed, under_limit), ".2f"),
            **{f"first token, {n}": self._first_token(key, str(n)) for n in self.run["options"]["prompts"]},
            "prefill token/s": cell("prefill_tokens_per_second", ".1f"),
            "hits": cell("hit_rate", ".1%"),
            "MB/token": cell("disk_bytes_per_token", ".1f", 1e-6),
            "stall": cell("stall_share", ".0%"),
            "roof": number(self.median(key, self._of_roof), ".0%"),
            "peak MB": cell("peak_bytes", ".0f", 1e-6),
        }

    def _first_token(self, key: Key, prompt: str) -> str:
        def took(record: Record) -> float:
            return record["ttft_s"][prompt]

        seconds = self.median(key, took)
        n_bytes = self.median(key, lambda record: record["ttft_bytes"][prompt])
        if seconds is None or n_bytes is None:
            return "-"
        ratio = _ratio(seconds, self._of_stock(key[0], min, took))
        return f"{seconds:.2f} s, {n_bytes / 1e9:.2f} GB" + (f" ({ratio:.2f})" if ratio is not None else "")


def _get(name: str) -> Callable[[Record], float | None]:
    return lambda record: record[name]


def _ratio(value: float | None, to: float | None) -> float | None:
    return value / to if value is not None and to else None


def _missed_bytes(record: Record) -> float | None:
    """Bytes read per token, without those of unused prefetches."""
    counters = record["counters"]
    if not counters:
        return None
    unused = 1 - counters["prefetched_used"] / max(1, counters["prefetched"])
    return (counters["bytes_read"] - unused * counters["bytes_prefetched"]) / record["n_decoded"]


#
# table
#


def table(results: Results) -> str:
    """The run and its rows, as text that is a Markdown table as well."""
    rate = results.bandwidth()
    disk = "no direct I/O" if rate is None else f"disk {rate / 1e9:.2f} GB/s by direct reads"
    disk += f", readahead {results.run['readahead_kb']} KiB"
    rows = [results.cells(key) for key in results.order]
    return "\n".join([*preface(results, disk), "", *markdown(rows)])


def preface(results: Results, transport: str) -> list[str]:
    """Lines that say what was run on what. transport: on what the experts come by."""
    run = results.run
    machine, moe, options = run["machine"], run["moe"], run["options"]
    return [
        f"{run['model']}, {run['model_bytes'] / 1e9:.2f} GB, {moe['n_layers']} layers, "
        f"{moe['n_used']} of {moe['n_experts']} experts; routing: {run['routing']}",
        f"{machine['cpu']}, {machine['cores']} cores, {options['n_threads']} threads, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB; {transport}",
        f"commit {run['commit'] or '-'}, pyhobbit {run['pyhobbit']}, {run['time']}, "
        f"medians of {options['reps']}; {_tiers_text(options)}",
    ]


def _tiers_text(options: dict[str, Any]) -> str:
    if options["low"] is None:
        return "low tier: none"
    return f"low tier: {options['low']}, t1 = {options['t1']:g}, t2 = {options['t2']:g}"
