"""Kernels for coupled pruning on one device.

Read in the order of the data flow: `views` (geometry), `pieces` (what a plan hands over), `cpu` and
`flat` (measure and write), `select` (the k lowest). Knows nothing of clusters, optimizers or
torch.distributed.
"""

from coupled_kernels.cpu import measure, write
from coupled_kernels.flat import measure_flat, write_flat
from coupled_kernels.pieces import FlatPiece, Piece
from coupled_kernels.select import lowest
from coupled_kernels.views import ChannelMap, NotAView, View, make_views

__all__ = [
    "ChannelMap",
    "FlatPiece",
    "NotAView",
    "Piece",
    "View",
    "lowest",
    "make_views",
    "measure",
    "measure_flat",
    "write",
    "write_flat",
]
