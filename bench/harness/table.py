# SPDX-License-Identifier: MIT
"""Tables of Markdown, and that of a comparison: medians, ratios and the roof of its lines of JSON."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.harness.arms import DEMAND, kind

Record = Mapping[str, Any]
Figure = Callable[[Record], float | None]
Key = tuple[float | None, str]
"""Limit, None where there is none, and arm."""

_MAPPED = ("stock", "stock-128k")  # stock under a limit means the better of them
_SELECTIONS = "selections_high selections_low selections_skipped"
# counters to be added and divided, format, and factor; n_decoded counts tokens
_ON_A_DEVICE = {
    "host hits": ("host_hits_high host_hits_low", "misses_high misses_low", ".1%", 1),
    "by the CPU": ("selections_cpu", _SELECTIONS, ".0%", 1),
    "evicted/token": ("evictions", "n_decoded", ".1f", 1),
    "early": ("selections_early", _SELECTIONS, ".0%", 1),
    "replaced": ("selections_replaced", _SELECTIONS, ".0%", 1),
    **{f"{name}/layer": (f"device_{name}", "layers_computed", ".1f", 1)
       for name in ("launches", "waits", "reads", "copies")},
    "MB/token moved": ("bytes_transferred", "n_decoded", ".1f", 1e-6),
    "GB/s": ("bytes_transferred", "transfer_s", ".2f", 1e-9),
}  # fmt: skip
# of a modelled machine
_GROUPS = {
    "per_layer": ("{}/layer", ".1f"),
    "per_layer_us": ("{}, us", ".0f"),
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
    """A sum of counters by another; None where the arm has none of them."""

    def ratio(record: Record) -> float | None:
        values = {**record.get("counters", {}), "n_decoded": record.get("n_decoded", 0)}
        divisor = sum(values.get(name, 0) for name in under.split())
        names = over.split()
        return sum(values[name] for name in names) / divisor if divisor and names[0] in values else None

    return ratio


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
        at = {key[0]: "" if key[0] is None else f" at {key[0]:.0%}" for key in self._all}
        return list(dict.fromkeys(f"{r['arm']}{at[r['limit']]}: {r['error']}" for r in failed))

    def bandwidth(self) -> float | None:
        """Bytes per second of direct reads, the median over the repetitions."""
        found = (r.get("disk_bytes_per_second") for group in self._all.values() for r in group)
        known = [rate for rate in found if rate]
        return median(known) if known else None

    def median(self, key: Key, figure: Figure) -> float | None:
        """Over the repetitions that have this figure."""
        values = [value for r in self._good.get(key, []) if (value := figure(r)) is not None]
        return median(values) if values else None

    def _of_roof(self, record: Record) -> float | None:
        """Share of what compute, or the disk beside this repetition, allows, without unused prefetches."""
        resident = self.median((None, "ours-resident"), _get("tokens_per_second"))
        counters, bandwidth = record.get("counters"), record.get("disk_bytes_per_second")
        if resident is None or not counters or bandwidth is None:
            return None
        unused = 1 - counters["prefetched_used"] / max(1, counters["prefetched"])
        missed = (counters["bytes_read"] - unused * counters["bytes_prefetched"]) / record["n_decoded"]
        return record["tokens_per_second"] * max(1 / resident, missed / bandwidth)

    def _of_stock(self, limit: float | None, better: Callable[..., float], figure: Figure) -> float | None:
        names = ("stock", "stock-repacked") if self.has_device else ("stock",) if limit is None else _MAPPED
        keys = [key for key in self._all if key[0] == limit and kind(key[1]) in names]
        values = [value for key in keys if (value := self.median(key, figure)) is not None]
        return better(values) if values else None

    def cells(self, key: Key) -> dict[str, str]:
        """Medians over an arm's repetitions at one limit, by column, without those that it does not have.

        range: least - most tokens per second.  kept: share of the decode speed of stock llama.cpp with
        everything in memory.  to stock: the decode speed by that of stock under the same limit.
        first token: seconds, GB read meanwhile, and the time by stock's under the same limit, below 1 where
        this is sooner.  roof: share of what compute or the disk allow, whichever allows less.
        """
        limit, arm = key
        speeds = [r["tokens_per_second"] for r in self._good[key]]
        n_failed = len(self._all[key]) - len(speeds)
        of_speed = _get("tokens_per_second")
        speed, demand = self.median(key, of_speed), self.median((None, DEMAND), of_speed)
        in_memory, under_limit = self.median((None, "stock"), of_speed), self._of_stock(limit, max, of_speed)
        figures = {
            "source": self.run.get("source", "-"),
            "device memory" if self.has_device else "memory": "all" if limit is None else f"{limit:.0%}",
            "arm": arm + (f" ({n_failed} failed)" if n_failed else ""),
            "token/s": number(speed, ".2f"),
            "least - most": f"{min(speeds):.2f} - {max(speeds):.2f}" if speeds else "-",
            "kept": number(_ratio(speed, in_memory), ".0%"),
            "to stock": number(_ratio(speed, under_limit), ".2f"),
            "to demand": number(_ratio(speed, demand), ".2f"),
            **{f"first token, {n}": self._first_token(key, str(n)) for n in self.run["options"]["prompts"]},
        }
        for name, figure, how, scale in self._columns():
            figures[name] = number(self.median(key, figure), how, scale)
        for record in self._good[key][:1]:  # a modelled machine repeats itself
            for group, (title, how) in _GROUPS.items():
                own = record.get(group, {})
                figures |= {title.format(name): number(value, how) for name, value in own.items()}
        return {name: cell for name, cell in figures.items() if cell != "-"}

    def _columns(self) -> list[tuple[str, Figure, str, float]]:
        columns = [
            ("prefill token/s", _get("prefill_tokens_per_second"), ".1f", 1.0),
            ("hits", _get("hit_rate"), ".1%", 1),
            ("MB/token", _get("disk_bytes_per_token"), ".1f", 1e-6),
            ("stall", _get("stall_share"), ".0%", 1),
            ("peak MB", _get("peak_bytes"), ".0f", 1e-6),
        ]
        if not self.has_device:
            return [*columns, ("roof", self._of_roof, ".0%", 1)]
        columns += [(name, _by(of, by), how, scale) for name, (of, by, how, scale) in _ON_A_DEVICE.items()]
        columns += [
            ("device MB", _get("device_bytes"), ".0f", 1e-6),
            ("token, ms", _get("token_ms"), ".2f", 1),
        ]
        return [*columns, ("beside, us/layer", _get("layer_beside_us"), ".0f", 1)]

    def _first_token(self, key: Key, prompt: str) -> str:
        def took(record: Record) -> float | None:
            return record.get("ttft_s", {}).get(prompt)

        seconds = self.median(key, took)
        n_bytes = self.median(key, lambda record: record.get("ttft_bytes", {}).get(prompt))
        if seconds is None or n_bytes is None:
            return "-"
        ratio = _ratio(seconds, self._of_stock(key[0], min, took))
        return f"{seconds:.2f} s, {n_bytes / 1e9:.2f} GB" + (f" ({ratio:.2f})" if ratio is not None else "")


def _ratio(value: float | None, to: float | None) -> float | None:
    return value / to if value is not None and to else None


def table(results: Results) -> str:
    """The run and its rows, as text that is a Markdown table as well."""
    run = results.run
    machine, moe, options = run["machine"], run["moe"], run["options"]
    tiers = "low tier: none"
    if options["low"] is not None:
        tiers = f"low tier: {options['low']}, t1 = {options['t1']:g}, t2 = {options['t2']:g}"
    lines = [
        f"{run['model']}, {run['model_bytes'] / 1e9:.2f} GB, {moe['n_layers']} layers, "
        f"{moe['n_used']} of {moe['n_experts']} experts; routing: {run['routing']}",
        f"{machine['cpu']}, {machine['cores']} cores, {options['n_threads']} threads, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB; {_transport(results)}",
        f"commit {run['commit'] or '-'}, pyhobbit {run['pyhobbit']}, {run['time']}, "
        f"medians of {options['reps']}; {tiers}",
    ]
    if results.has_device:
        layers = ", ".join(f"{n} at {float(share):.0%}" for share, n in run["n_cpu_moe"].items())
        lines.append(f"stock: --n-cpu-moe {layers}, the smallest at which the experts fit; device memory as "
                     f"shares of {run['expert_bytes'] / 1e9:.2f} GB of experts")  # fmt: skip
    return "\n".join([*lines, "", *markdown([results.cells(key) for key in results.order])])


def _transport(results: Results) -> str:
    """The disk or the device that the experts come from."""
    run = results.run
    if "prices" in run:
        return f"modelled: {run['prices']}"
    if results.has_device:
        device = run["device"]
        return f"{device['name']}: {device['description']}, {device['total_bytes'] / 1e9:.0f} GB"
    rate = results.bandwidth()
    disk = "no direct I/O" if rate is None else f"disk {rate / 1e9:.2f} GB/s by direct reads"
    return f"{disk}, readahead {run['readahead_kb']} KiB"
