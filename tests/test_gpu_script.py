"""The GPU script runs to its end, on toys in the interpreter where there is no GPU, and says what it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    environment = dict(os.environ) if torch.cuda.is_available() else os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()) | {"printed": done.stdout}


def test_every_check_passes_or_says_why_it_was_skipped(report):
    results = [check["result"] for check in report["checks"]]
    assert results.count("passed") >= 64
    assert all(result == "passed" or result.startswith("skipped: ") for result in results)


def test_figures_of_the_interpreter_are_not_called_timings(report):
    assert report["timings"] == torch.cuda.is_available()
    assert ("no timings" in report["printed"]) == (not torch.cuda.is_available())


def test_parts_and_launches_are_reported(report):
    parts = {row["part"]: row for row in report["rows"]}
    assert {"norms", "mask", "projection (launched)", "torchao sequence"} <= set(parts)
    assert 0 < parts["projection (launched)"]["launches"] <= 12
