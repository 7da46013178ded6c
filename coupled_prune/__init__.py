"""Coupled pruning: one channel mask for all tensors that share the channels.

Read in the order of the data flow: `member` and `cluster` (what the caller says), `groupers` (channels of a
shape), `validate`, `plan` (path of each member), `budget` (how many channels), `prune` (measure, select,
write, account), `result`. `explain` shows the plan. `reference` is the plain path everything fast is
checked against. `python -m coupled_prune` runs `demo`.
"""

from coupled_prune.budget import budget
from coupled_prune.cluster import Cluster
from coupled_prune.explain import Explanation, explain
from coupled_prune.member import Member
from coupled_prune.optimizer import PruneOptimizer
from coupled_prune.param_groups import build_prune_optimizer, get_param_groups
from coupled_prune.prune import apply_masks_, prune_
from coupled_prune.result import ClusterResult, ParameterResult, PruneResult

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "ClusterResult",
    "Explanation",
    "Member",
    "ParameterResult",
    "PruneOptimizer",
    "PruneResult",
    "apply_masks_",
    "budget",
    "build_prune_optimizer",
    "explain",
    "get_param_groups",
    "prune_",
]
