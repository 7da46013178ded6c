"""Every kernel and class compiles for GPUs that are not there, and the machine code is what was planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

TILE_KERNELS = {"norms", "mask_rows", "mask_any", "count", "scale"}


@pytest.fixture(scope="module")
def rows():
    """All targets at once, one process each for two of them at a time."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.machine_code"]
    pairs = [("sm_80", "sm_90"), ("sm_100", "gfx942")]
    running = [
        subprocess.Popen([*command, *pair], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for pair in pairs
    ]
    found = []
    for process in running:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
        found += [json.loads(line) for line in out.splitlines()]
    return found


@pytest.mark.slow
def test_every_kernel_and_class_compiles_for_every_target(rows):
    targets = {target: [row for row in rows if row["target"] == target] for target in {row["target"] for row in rows}}
    assert set(targets) == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert len({len(found) for found in targets.values()}) == 1
    assert {row["kernel"] for row in rows} == TILE_KERNELS | {"fold_lanes", "fold_channels", "select", "account"}


@pytest.mark.slow
def test_no_spills_and_at_most_128_registers(rows):
    for row in rows:
        if row["target"] == "sm_90":
            assert row["stack"] == 0, row
            assert row["registers"] <= 128, row
            assert not any(op.startswith(("LDL", "STL")) for op in row["operations"]), row


@pytest.mark.slow
def test_aligned_classes_access_weights_by_16_bytes(rows):
    """Tables are read by 8 bytes, masks of lanes by one: loads of other widths are of weights, and so are the
    stores of `mask_rows`."""
    for row in rows:
        if row["target"] != "sm_90" or row["kernel"] not in {"norms", "count", "mask_rows"}:
            continue
        wide = "STG.E.128" if row["kernel"] == "mask_rows" else "LDG.E.128"
        narrow = {"STG.E", "STG.E.64", "STG.E.U16"} if row["kernel"] == "mask_rows" else {"LDG.E", "LDG.E.U16"}
        assert (wide in row["operations"]) == row["aligned"], row
        assert not (row["aligned"] and narrow & set(row["operations"])), row


@pytest.mark.slow
def test_small_numbers_are_not_flushed_to_zero(rows):
    """A subnormal weight is not a literal zero; flushing would count it as one."""
    assert not any(row["ftz"] for row in rows if row["target"] == "sm_90")


@pytest.mark.slow
def test_workgroups_fit_amd(rows):
    """64 lanes a wave: more than 16 waves exceed the 1024 threads of a workgroup."""
    assert all(row["warps"] * 64 <= 1024 for row in rows)
