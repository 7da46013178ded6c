"""Checks the kernels on a GPU, then times them: one command from the source tree, nothing to install.

    python -m benchmarks.gpu [--out FILE] [--quick]

In under four minutes: the grid of correctness checks against the reference path, compute-sanitizer where
there is one, a captured CUDA graph with a changing budget; then norms, mask and the whole projection for
the registry's clusters, against the reference path, TorchAO's dense sequence, `torch.compile` of that
sequence, and the device's own copy bandwidth. Prints a table and writes one JSON file.

Without a GPU it runs toy sizes in Triton's interpreter (TRITON_INTERPRET=1), so that the script itself is
tested; such results say that they are no timings.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.peers import reference, torchao_sequence
from benchmarks.registry import build, parameters
from coupled_kernels import launches, make_step
from coupled_kernels.gpu import GpuStep
from coupled_prune import Cluster, Member, prune_
from coupled_prune.plan import build_plan

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Run all; returns 1 where a check failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="JSON file to write (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small clusters only")
    parser.add_argument("--checks-only", action="store_true", help="no timings (what compute-sanitizer runs)")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    toy = device.type == "cpu"

    checks = [*grid_checks(device, toy), graph_check(device)]
    if not toy and not options.checks_only:
        checks.append(sanitizer_check())
    rows = [] if options.checks_only else timings(device, toy, options.quick)
    report = {
        "device": torch.cuda.get_device_name(device) if not toy else "interpreter on a CPU: no timings",
        "timings": not toy,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "copy_gb_per_s": None if toy or options.checks_only else round(copy_bandwidth(device), 1),
        "checks": checks,
        "rows": rows,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    return int(any(check["result"] == "failed" for check in checks))


def weight(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "row-strided": lambda x: torch.nn.functional.pad(x, (0, 3))[:, :-3],
    "misaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


def grid_checks(device: torch.device, toy: bool) -> list[Row]:
    """Fast against reference path: dtypes, layouts, sizes, crossing clusters; masks, bits, counts, repeats."""
    sizes = [(1, 1), (1, 70), (70, 1), (9, 13)]
    sizes += [] if toy else [(64, 96), (513, 1025), (4096, 1024), (3000, 3), (5, 5000), (100_000, 64)]
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    checks = []
    for dtype, layout, (rows, cols) in itertools.product(dtypes, LAYOUTS, sizes):
        matrix = LAYOUTS[layout](weight(rows, cols, dtype=dtype, device=device))
        matrix[::3, ::2] = -0.0
        masks, bits, zeros = [], [], []
        for path in ("fast", "fast", "reference"):
            copy = LAYOUTS[layout](matrix.clone())
            square = weight(cols, cols if cols < 2000 else 1, dtype=dtype, device=device)
            clusters = [
                Cluster("rows", [Member(copy, "Dim0Grouper")], 0.4 if rows > 1 else 0.0),
                Cluster("cols", [Member(copy, "Dim1Grouper"), Member(square, "Dim0Grouper")], 0.3 if cols > 1 else 0.0),
            ]
            result = prune_(clusters, path="reference" if path == "reference" else "fast")
            masks.append(result.masks())
            bits.append(torch.cat([copy.flatten(), square.flatten()]).cpu().view(torch.uint8))
            zeros.append(result.zero_elts)
        good = masks[0] == masks[1] and torch.equal(bits[0], bits[1]) and zeros[0] == zeros[1]
        # The reference sums in float64: scores within rounding of each other may be chosen differently.
        agree = masks[0] == masks[2] and torch.equal(bits[0], bits[2]) and zeros[0] == zeros[2]
        name = f"{str(dtype).removeprefix('torch.')} {layout} {rows}x{cols}"
        checks.append({"check": name, "result": "passed" if good and agree else "failed"})
    return checks


def graph_check(device: torch.device) -> Row:
    """A captured step replays with weights and budgets that changed since; no host synchronization inside."""
    if device.type != "cuda":
        return {"check": "CUDA graph with a changing budget", "result": "skipped: no GPU"}
    reader, writer = (weight(*s, dtype=torch.bfloat16, device=device) for s in ((512, 256), (256, 512)))
    dense = [reader.clone(), writer.clone()]
    plan = build_plan([Cluster("c", [Member(reader, "Dim1Grouper"), Member(writer, "Dim0Grouper")], 0.5)])
    step = GpuStep(plan.pieces, plan.fillers, plan.parameters, plan.segments, plan.pools)
    budgets, zeros = torch.tensor([8], device=device), torch.zeros(2, dtype=torch.int64, device=device)

    def whole() -> None:
        zeros.zero_()
        step.write(step.select(step.measure(), budgets), zeros)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        whole()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            whole()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    good = True
    for k in (3, 100, 0, 256, 17):
        for live, original in zip((reader, writer), dense, strict=True):
            live.copy_(original)
        budgets.fill_(k)
        graph.replay()
        good &= int((reader == 0).all(0).sum()) == k == int((writer == 0).all(1).sum())
        good &= zeros.tolist() == [int((reader == 0).sum()), int((writer == 0).sum())]
    return {"check": "CUDA graph with a changing budget", "result": "passed" if good else "failed"}


def sanitizer_check() -> Row:
    """The checks once more under compute-sanitizer, where it is installed."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not tool:
        return {"check": "compute-sanitizer", "result": "skipped: not installed"}
    command = [tool, "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu", "--checks-only"]
    try:
        done = subprocess.run([*command, "--out", "/dev/null"], capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        return {"check": "compute-sanitizer", "result": "skipped: out of time"}
    return {"check": "compute-sanitizer", "result": "passed" if done.returncode == 0 else "failed"}


def clusters_to_time(device: torch.device, toy: bool, quick: bool) -> dict[str, list[Cluster]]:
    """Large clusters from the registry, and 250 small shards; toys where there is no GPU."""
    if toy:
        tiny = weight(64, 96, dtype=torch.float32, device=device)
        return {"toy": [Cluster("toy", [Member(tiny, "Dim1Grouper")], 0.25)]}
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for model in ("tinyllama-1.1b residual", "tinyllama-1.1b", "llama-3-8b")[: 1 if quick else 3]:
            found[f"{model}, {name}"] = build(model, dtype, device=device.type)
        shards = [weight(256, 1024, dtype=dtype, device=device).clone() for _ in range(250)]
        found[f"250 shards of 256x1024, {name}"] = [Cluster("shards", [Member(s, "Dim1Grouper") for s in shards], 0.25)]
        if not quick:
            large = torch.empty(16384, 65536, dtype=dtype, device=device).normal_()
            found[f"16384x65536 readers, {name}"] = [Cluster("large", [Member(large, "Dim1Grouper")], 0.25)]
            found[f"16384x65536 writers, {name}"] = [Cluster("large", [Member(large, "Dim0Grouper")], 0.25)]
    return found


def timings(device: torch.device, toy: bool, quick: bool) -> list[Row]:
    """Milliseconds of each part and peer; GB/s of weights, to compare with the copy bandwidth."""
    rows: list[Row] = []
    for name, clusters in clusters_to_time(device, toy, quick).items():
        weights = parameters(clusters)
        size = sum(w.numel() * w.element_size() for w in weights)
        plan = build_plan(clusters)
        step = make_step(plan.pieces, plan.fillers, plan.parameters, plan.segments, plan.pools)
        zeros = torch.zeros(len(weights), dtype=torch.int64, device=device)
        ks = [max(1, segment.channels // 4) for segment in plan.segments]
        chosen = step.select(step.measure(), ks)

        def whole(step: Any = step, ks: Any = ks, zeros: Any = zeros) -> None:
            step.write(step.select(step.measure(), ks), zeros)

        before = launches()
        whole()
        count = sum((launches() - before).values())
        parts: dict[str, Callable[[], object]] = {
            "norms": step.measure,
            "mask": functools.partial(step.write, chosen, zeros),
            "projection (launched)": whole,
            "prune_ (with checks and planning)": functools.partial(prune_, clusters),
            "torchao sequence": functools.partial(torchao_sequence, clusters),
        }
        if device.type == "cuda":
            parts["projection (graph)"] = captured(whole)
            if size < 2e9:
                parts["reference"] = functools.partial(reference, clusters)
            if name.startswith("tinyllama-1.1b residual"):
                compiled = torch.compile(torchao_sequence, dynamic=False)
                parts["torch.compile of the torchao sequence"] = functools.partial(compiled, clusters)
        for part, call in parts.items():
            try:
                milliseconds = median_ms(call, device)
            except Exception as error:  # a peer that fails is a result, too
                rows.append({"clusters": name, "part": part, "error": f"{type(error).__name__}: {error}"[:200]})
                continue
            rows.append(
                {
                    "clusters": name,
                    "part": part,
                    "ms": round(milliseconds, 4),
                    "gb_per_s": round(size / milliseconds / 1e6, 1),
                    "gb": round(size / 1e9, 3),
                    "launches": count if part.startswith("projection") else None,
                }
            )
        del step, plan, weights, clusters, parts, whole
    return rows


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """`call` as a CUDA graph: its device time alone."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def median_ms(call: Callable[[], object], device: torch.device) -> float:
    """Median of up to 20 calls in at most about a second, after a warm-up."""
    call()
    times: list[float] = []
    end = time.perf_counter() + 1
    while len(times) < 20 and (len(times) < 3 or time.perf_counter() < end):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            before = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - before))
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """GB/s read plus written by a device-to-device copy of 2 GB."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source), device) / 1e6


def show(report: Row) -> None:
    """The report as text; norms read only, so their share is of the copy's bytes read and written."""
    failed = [check["check"] for check in report["checks"] if check["result"] == "failed"]
    passed = sum(check["result"] == "passed" for check in report["checks"])
    print(f"{report['device']}; torch {report['torch']}, triton {report['triton']}, Python {report['python']}")
    print(f"checks: {passed} passed, {len(failed)} failed {failed or ''}")
    for check in report["checks"]:
        if check["result"].startswith("skipped"):
            print(f"  {check['check']}: {check['result']}")
    copy = report["copy_gb_per_s"]
    print(f"copy bandwidth: {copy} GB/s" if copy else "no timings on this device; the figures below only show the form")
    for row in report["rows"]:
        if "error" in row:
            print(f"{row['clusters']:38s} {row['part']:38s} {row['error']}")
            continue
        share = f"{row['gb_per_s'] / copy:6.1%} of copy" if copy else ""
        count = f"{row['launches']} launches" if row["launches"] else ""
        print(
            f"{row['clusters']:38s} {row['part']:38s} {row['ms']:10.3f} ms {row['gb_per_s']:8.1f} GB/s {share} {count}"
        )


if __name__ == "__main__":
    sys.exit(main())
