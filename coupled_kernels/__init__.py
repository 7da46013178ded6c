"""Kernels for coupled pruning on one device.

Read in the order of the data flow: `views` (geometry), `pieces` (what a plan hands over), `step` (which
path a device takes). The CPU path is `cpu`, which selects with `lowest`. The Triton path is `rows` and
`tiles` (tables), `norms`, `fold`, `select`, `account`, `mask`, `scale` (one kernel file each), `launch` (which
counts) and `gpu` (their order); `tuning` has its sizes. `flat` serves clusters with about as many
channels as elements. Knows nothing of clusters, optimizers or torch.distributed.
"""

from coupled_kernels import tuning
from coupled_kernels.flat import measure_flat, scale_flat, write_flat
from coupled_kernels.launch import launches
from coupled_kernels.lowest import lowest
from coupled_kernels.pieces import FlatPiece, Piece, Segment
from coupled_kernels.step import backend, make_step
from coupled_kernels.views import ChannelMap, NotAView, View, make_views

__all__ = [
    "ChannelMap",
    "FlatPiece",
    "NotAView",
    "Piece",
    "Segment",
    "View",
    "backend",
    "launches",
    "lowest",
    "make_step",
    "make_views",
    "measure_flat",
    "scale_flat",
    "tuning",
    "write_flat",
]
