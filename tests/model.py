"""A small model and its clusters, as `from_names` meets them."""

from __future__ import annotations

import torch
from torch import nn

from coupled_prune import Cluster


class Block(nn.Module):
    """Packed attention and a feed-forward block on a stream of 8, as `from_names` meets them."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 16)
        self.out = nn.Linear(8, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)


class Model(nn.Module):
    """Two blocks between tied embeddings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight


QKV = [  # two groups: two query heads of two lanes each, one key and one value head
    {"grouper": "AttentionHeadGrouperDim0", "head_dim": 4, "rows": (0, 8)},
    {"grouper": "AttentionHeadGrouperDim0", "head_dim": 2, "rows": (8, 12)},
    {"grouper": "AttentionHeadGrouperDim0", "head_dim": 2, "rows": (12, 16)},
]


def stream(model, target=0.3):
    patterns = {
        "embed.weight": "Dim1Grouper",
        "blocks.*.qkv.weight": "Dim1Grouper",
        "blocks.*.out.*": {"grouper": "Dim0Grouper", "scored": False},
        "blocks.*.up.weight": {"grouper": "AxisGrouper", "axis": 1},
        "*.down.*": "Dim0Grouper",
    }
    return Cluster.from_names(model, "stream", patterns, target)


def groups(model):
    patterns = {"blocks.0.qkv.weight": QKV, "blocks.0.out.weight": {"grouper": "AxisGrouper", "axis": 1, "block": 4}}
    return Cluster.from_names(model, "groups", patterns, 0.5, score_type="rms")
