"""Compiles every kernel and class for GPUs that are not there; run as a script, prints one JSON object a line.

    python -m tests.machine_code sm_90 sm_100 ...

It has to be a process of its own: kernels that were imported for the interpreter cannot be compiled.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coupled_kernels import account, fold, mask, norms, scale, select, tuning

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {
    "float16": (tl.float16, 2),
    "bfloat16": (tl.bfloat16, 2),
    "float32": (tl.float32, 4),
    "float64": (tl.float64, 8),
}
WIDE = {"float32": "*fp32", "float64": "*fp64"}


def tile_kernels(sizes):
    for (name, (dtype, size)), compute, aligned, kind in itertools.product(
        DTYPES.items(), WIDE, (True, False), ("wide", "tall")
    ):
        if name == "float64" and compute == "float32":
            continue
        shape = getattr(sizes, kind)
        common = {
            "DTYPE": dtype,
            "VECTOR": 16 // size if aligned else 1,
            "STEP": shape.step,
            "COLS": shape.cols,
        }
        computing = common | {"COMPUTE": getattr(tl, compute)}
        facts = {"dtype": name, "compute": compute, "aligned": aligned, "kind": kind}
        chain = {"CHAIN": sizes.chain}
        yield (
            norms.norms,
            {"tiles": "*i64", "partials": WIDE[compute], "zeros": "*i16"},
            computing | chain,
            shape.warps,
            facts,
        )
        yield mask.mask_any, {"tiles": "*i64", "chosen": "*i8", "zeros": "*i64"}, computing, shape.warps, facts
        yield scale.scale, {"tiles": "*i64", "factors": "*fp64"}, computing, shape.warps, facts
        if compute == "float32" or name == "float64":
            yield account.count, {"tiles": "*i64", "zeros": "*i64"}, computing, shape.warps, facts
            yield mask.mask_rows, {"tiles": "*i64", "chosen": "*i8"}, common, shape.warps, facts


def shared_kernels(sizes):
    lanes = {"partials": "*fp32", "wide_partials": "*fp64", "zeros": "*i16", "lane_sums": "*fp64", "lane_zeros": "*i32"}
    yield fold.fold_lanes, {"runs": "*i64", **lanes}, {"DEPTH": sizes.fold_depth, "LANES": sizes.fold_lanes}, 4, {}
    constants = {"ENTRIES": sizes.fold_entries, "CHANNELS": sizes.fold_channels}
    signature = {"chunks": "*i64", "entries": "*i64", "lane_sums": "*fp64", "scores": "*fp64"}
    yield fold.fold_channels, signature, constants, 4, {}
    signature = {"scores": "*fp64", "segments": "*i64", "budgets": "*i64", "chosen": "*i8"}
    yield select.select, signature, {"CHUNK": sizes.select_chunk}, 4, {}
    signature = {"runs": "*i64", "chosen": "*i8", "lane_zeros": "*i32", "chosen_lanes": "*i8", "zeros": "*i64"}
    yield account.account, signature, {"LANES": sizes.fold_lanes}, 4, {}


def compiled(kernel, signature, constants, warps, target):
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        # Tables and buffers come from the allocator, which aligns them; addresses inside tables do not.
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in signature},
    )
    return triton.compile(source, target=target, options={"num_warps": warps})


def machine_code(cubin):
    """Registers, spilled bytes and the memory instructions with their widths, from the cubin itself."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([cuobjdump, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    operations = re.findall(r"\b((?:LDG|STG|LDL|STL)[.\w]*)", sass)
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "operations": {op: operations.count(op) for op in sorted(set(operations))},
    }


def main(targets):
    for name in targets:
        sizes = tuning.TUNINGS["hip" if name.startswith("gfx") else "cuda"]
        for kernel, signature, constants, warps, facts in (*shared_kernels(sizes), *tile_kernels(sizes)):
            code = compiled(kernel, signature, constants, warps, TARGETS[name])
            row = {"target": name, "kernel": kernel.__name__, "warps": warps, **facts}
            if name == "sm_90":
                row |= machine_code(code.asm["cubin"])
                row["ftz"] = ".ftz" in code.asm["ptx"]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(sys.argv[1:] or list(TARGETS))
