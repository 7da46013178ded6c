"""Prints what the table of seconds lacks: GB/s of weights and the ratio to the peer it is compared with."""

from __future__ import annotations

from typing import Any

COMPARED_WITH = "torchao sequence"


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    session = getattr(config, "_benchmarksession", None)
    if session is None or not session.benchmarks:
        return
    groups: dict[str, dict[str, Any]] = {}
    for bench in session.benchmarks:
        groups.setdefault(bench.group, {})[bench.params["peer"]] = bench
    terminalreporter.section("GB/s of weights, medians")
    for group, peers in groups.items():
        base = peers.get(COMPARED_WITH)
        for name, bench in peers.items():
            ratio = f"{base.stats.median / bench.stats.median:6.2f}x" if base else ""
            line = f"{group:36s} {name:18s} {bench.extra_info['gb_per_s']:7.2f} GB/s {ratio}"
            terminalreporter.write_line(f"{line}  extra memory {bench.extra_info['peak_growth']}")
