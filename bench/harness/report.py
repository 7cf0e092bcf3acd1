# SPDX-License-Identifier: MIT
"""A run's results: medians, ratios and the roof, as a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Row:
    """One arm at one limit: medians over n repetitions. A value is None if there is no such figure.

    least, most: of the tokens per second.  kept: share of the decode speed of stock llama.cpp with everything
    in memory.  to_stock: the decode speed by that of stock under the same limit.
    ttft_s: by prompt length; ttft_bytes: read meanwhile; ttft_to_stock: by stock's under the same limit,
    below 1 where this is sooner.
    of_roof: share of what compute or the disk allow, whichever allows less.  disk_use: bandwidth while there
    is a demanded read under way, as share of the disk's.
    """

    limit: float | None
    arm: str
    n: int
    n_failed: int
    tokens_per_second: float | None = None
    least: float | None = None
    most: float | None = None
    kept: float | None = None
    to_stock: float | None = None
    ttft_s: Mapping[str, float] | None = None
    ttft_bytes: Mapping[str, float] | None = None
    ttft_to_stock: Mapping[str, float] | None = None
    prefill_tokens_per_second: float | None = None
    hit_rate: float | None = None
    disk_bytes_per_token: float | None = None
    stall_share: float | None = None
    of_roof: float | None = None
    disk_use: float | None = None
    peak_bytes: float | None = None


class Results:
    """The repetitions of a run by limit and arm."""

    def __init__(self, records: Sequence[Record], stock: Sequence[str] = _MAPPED) -> None:
        """stock: the arms the better of which is compared with under a limit."""
        self.run = records[0]
        self._stock = stock
        self._all: dict[Key, list[Record]] = {}
        for record in records[1:]:
            self._all.setdefault((record["limit"], record["arm"]), []).append(record)
        self._good = {key: [r for r in group if "error" not in r] for key, group in self._all.items()}

    def errors(self) -> list[str]:
        """Errors, without repetitions."""
        failed = (r for group in self._all.values() for r in group if "error" in r)
        return list(dict.fromkeys(f"{r['arm']}{_at(r['limit'])}: {r['error']}" for r in failed))

    def rows(self) -> list[Row]:
        """In the order of the run."""
        return [self._row(key) for key in self._all]

    def bandwidth(self) -> float | None:
        """Bytes per second of direct reads, the median over the repetitions."""
        rates = [r["disk_bytes_per_second"] for group in self._all.values() for r in group]
        known = [rate for rate in rates if rate is not None]
        return median(known) if known else None

    def _roof(self, record: Record) -> float | None:
        """With the disk's speed beside this repetition."""
        resident = self.median((None, _RESIDENT), _get("tokens_per_second"))
        missed_bytes = _missed_bytes(record)
        bandwidth = record["disk_bytes_per_second"]
        if resident is None or missed_bytes is None or bandwidth is None:
            return None
        return 1 / max(1 / resident, missed_bytes / bandwidth)

    def _of_roof(self, record: Record) -> float | None:
        return _ratio(record["tokens_per_second"], self._roof(record))

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

    def _row(self, key: Key) -> Row:
        limit, arm = key
        good = self._good[key]
        n_failed = len(self._all[key]) - len(good)
        if not good:
            return Row(limit, arm, 0, n_failed)
        speeds = [r["tokens_per_second"] for r in good]
        prompts = {n: _ttft(n) for n in good[0]["ttft_s"]}
        ttft = {n: median(map(figure, good)) for n, figure in prompts.items()}
        to_stock = {n: _ratio(ttft[n], self._of_stock(limit, min, figure)) for n, figure in prompts.items()}
        medians = {
            name: self.median(key, _get(name))
            for name in (
                "prefill_tokens_per_second",
                "hit_rate",
                "disk_bytes_per_token",
                "stall_share",
                "peak_bytes",
            )
        }
        return Row(
            limit,
            arm,
            len(good),
            n_failed,
            tokens_per_second=median(speeds),
            least=min(speeds),
            most=max(speeds),
            kept=_ratio(median(speeds), self.median((None, _STOCK), _get("tokens_per_second"))),
            to_stock=_ratio(median(speeds), self._of_stock(limit, max, _get("tokens_per_second"))),
            ttft_s=ttft,
            ttft_bytes={n: median(r["ttft_bytes"][n] for r in good) for n in ttft},
            ttft_to_stock={n: ratio for n, ratio in to_stock.items() if ratio is not None},
            of_roof=self.median(key, self._of_roof),
            disk_use=self.median(key, _disk_use),
            **medians,
        )


def _get(name: str) -> Callable[[Record], float | None]:
    return lambda record: record[name]


def _ttft(n_tokens: str) -> Callable[[Record], float]:
    return lambda record: record["ttft_s"][n_tokens]


def _ratio(value: float, to: float | None) -> float | None:
    return value / to if to else None


def _missed_bytes(record: Record) -> float | None:
    """Per token. Bytes of unused prefetches do not count."""
    counters = record["counters"]
    if not counters:
        return None
    unused = 1 - counters["prefetched_used"] / max(1, counters["prefetched"])
    return (counters["bytes_read"] - unused * counters["bytes_prefetched"]) / record["n_decoded"]


def _disk_use(record: Record) -> float | None:
    counters, bandwidth = record["counters"], record["disk_bytes_per_second"]
    if not counters or not counters["disk_demand_s"] or not bandwidth:
        return None
    demanded = counters["bytes_read"] - counters["bytes_prefetched"]
    return demanded / counters["disk_demand_s"] / bandwidth


def _at(limit: float | None) -> str:
    return "" if limit is None else f" at {limit:.0%}"


#
# table
#


def table(results: Results) -> str:
    """The run and its rows, as text that is a Markdown table as well."""
    prompts = [str(n) for n in results.run["options"]["prompts"]]
    rate = results.bandwidth()
    disk = "no direct I/O" if rate is None else f"disk {rate / 1e9:.2f} GB/s by direct reads"
    disk += f", readahead {results.run['readahead_kb']} KiB"
    rows = [cells(row, prompts) for row in results.rows()]
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


def cells(row: Row, prompts: Sequence[str]) -> dict[str, str]:
    """By column."""
    spread = "-" if row.least is None else f"{row.least:.2f} - {row.most:.2f}"
    return {
        "memory": "all" if row.limit is None else f"{row.limit:.0%}",
        "arm": row.arm + (f" ({row.n_failed} failed)" if row.n_failed else ""),
        "token/s": number(row.tokens_per_second, ".2f"),
        "least - most": spread,
        "kept": number(row.kept, ".0%"),
        "to stock": number(row.to_stock, ".2f"),
        **{f"first token, {n}": _first_token(row, n) for n in prompts},
        "prefill token/s": number(row.prefill_tokens_per_second, ".1f"),
        "hits": number(row.hit_rate, ".1%"),
        "MB/token": number(row.disk_bytes_per_token, ".1f", 1e-6),
        "stall": number(row.stall_share, ".0%"),
        "roof": number(row.of_roof, ".0%"),
        "disk": number(row.disk_use, ".0%"),
        "peak MB": number(row.peak_bytes, ".0f", 1e-6),
    }


def _first_token(row: Row, prompt: str) -> str:
    if not row.ttft_s:
        return "-"
    ratio = (row.ttft_to_stock or {}).get(prompt)
    read = "" if row.ttft_bytes is None else f", {row.ttft_bytes[prompt] / 1e9:.2f} GB"
    return f"{row.ttft_s[prompt]:.2f} s{read}" + (f" ({ratio:.2f})" if ratio is not None else "")
