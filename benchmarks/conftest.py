"""Prints what the table of seconds lacks: GB/s of weights and the ratio to TorchAO's way of doing the same."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    session = getattr(config, "_benchmarksession", None)
    if session is None or not session.benchmarks:
        return
    groups: dict[str, dict[str, Any]] = {}
    for bench in session.benchmarks:
        if "gb_per_s" in bench.extra_info:
            groups.setdefault(bench.group, {})[bench.params["peer"]] = bench
    terminalreporter.section("GB/s of weights, medians")
    for group, peers in groups.items():
        base = next((bench for name, bench in peers.items() if name.startswith("torchao")), None)
        for name, bench in peers.items():
            ratio = f"{base.stats.median / bench.stats.median:6.2f}x" if base else ""
            line = f"{group:36s} {name:22s} {bench.extra_info['gb_per_s']:7.2f} GB/s {ratio}"
            more = [f"{key} {bench.extra_info[key]}" for key in ("peak_growth", "latents") if key in bench.extra_info]
            terminalreporter.write_line("  ".join([line, *more]))
