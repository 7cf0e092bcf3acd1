# SPDX-License-Identifier: MIT
"""A comparison's report: medians and ratios."""

from typing import Any

from bench.harness import table


def _record(arm: str, limit: float | None, speed: float, **figures: Any) -> dict[str, Any]:
    measured = {
        "ttft_s": {"16": 10 / speed}, "ttft_bytes": {"16": 2_000_000_000}, "n_decoded": 8,
        "tokens_per_second": speed, "disk_bytes_per_token": 0,
        "hit_rate": None, "stall_share": None, "counters": {},
    }  # fmt: skip
    place = {"arm": arm, "limit": limit, "peak_bytes": 5}
    return {**measured, **place, "disk_bytes_per_second": 1e9, **figures}


HEAD = {
    "time": "now", "pyhobbit": "1", "commit": None,
    "machine": {"cpu": "c", "cores": 2, "memory_bytes": 8e9},
    "model": "m.gguf", "model_bytes": 4e9, "moe": {"n_layers": 1, "n_experts": 8, "n_used": 2},
    "readahead_kb": 128, "routing": "the model's own",
    "options": {"low": None, "t1": 1, "t2": 1, "reps": 3, "prompts": [16], "n_threads": 2},
}  # fmt: skip


def test_the_report_is_medians_and_ratios() -> None:
    ours = {"disk_bytes_per_token": 1e8, "hit_rate": 0.5, "stall_share": 0.1}
    records = [
        HEAD,
        *(_record("stock", None, speed) for speed in (19, 20, 26)),
        _record("ours-resident", None, 16),
        _record("stock", 0.25, 2),
        _record("stock-128k@512", 0.25, 3),
        _record("stock-128k@2048", 0.25, 4),
        *(_record("ours", 0.25, speed, **ours) for speed in (9, 8, 5)),
        {
            "arm": "ours",
            "limit": 0.25,
            "error": "gone",
            "disk_bytes_per_second": 1e9,
        },
    ]
    results = table.Results(records)
    assert results.cells((0.25, "ours")) == {
        "memory": "25%", "arm": "ours (1 failed)", "token/s": "8.00", "least - most": "5.00 - 9.00",
        "kept": "40%", "to stock": "2.00",  # stock has 20, and 4
        "first token, 16": "1.25 s, 2.00 GB (0.50)", "hits": "50.0%",
        "MB/token": "100.0", "stall": "10%", "disk GB/s": "1.00", "peak MB": "0",
    }  # fmt: skip
    assert results.cells((None, "ours-resident"))["first token, 16"] == "0.62 s, 2.00 GB (1.25)"
    assert results.errors() == ["ours at 25%: gone"]
    text = table.table(results)
    assert "| 25%    | ours (1 failed) | 8.00    | 5.00 - 9.00" in text
    assert "| machine" in text
    assert "cpu: c, cores: 2" in text
    tables = [[line.count("|") for line in each.splitlines()] for each in text.split("\n\n")]
    assert [len(set(counts)) for counts in tables] == [1, 1]
