"""Healing: what was zero when it began stays +0.0 after every step, and nothing else is held."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from coupled_prune import Cluster, Member, PruneOptimizer, apply_masks_
from coupled_prune.frozen import pack, unpack
from tests.oracle import bits
from tests.training import BASES, Stream, assert_same, gradients, snapshot, train, wrapped


def healed(model, base="adamw", warmup=0, pruning=2, groups=None, **options):
    """An optimizer whose next step is the first of healing."""
    optimizer = wrapped(model, base, warmup, warmup + pruning, groups, **options)
    train(optimizer, list(model.parameters()), warmup + pruning)
    assert optimizer.phase == "healing"
    return optimizer


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("latent", [True, False], ids=["latent", "direct"])
def test_large_moments_cannot_revive(base, latent):
    """Moments built up on channels before they fall into the mask push in every step; so does weight decay."""
    model = Stream()
    optimizer = wrapped(model, base, 6, 7, latent_weights=latent)
    for _ in range(7):
        for p in model.parameters():
            p.grad = torch.full_like(p, 50.0)
        optimizer.step()
    dead = model.dead()
    assert len(dead) == 4
    for n in range(50):
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if n % 2 else torch.randn_like(p) * 100
        optimizer.step()
        assert model.dead() == dead
    assert optimizer.masks() == {"stream": dead}


def test_a_live_weight_may_pass_through_zero():
    """The set is stored, not read back from the weights: zeros that come later move on in the next step."""
    model = Stream()
    optimizer = healed(model, "plain")
    live = next(c for c in range(8) if c not in model.dead())
    with torch.no_grad():
        model.embed[0, live] = 0.0
        for part in model.slices(live)[1:]:
            part.zero_()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert model.embed[0, live].item() == pytest.approx(-0.05)
    assert all((part == model.embed[0, live]).all() for part in model.slices(live)[1:])
    assert live not in optimizer.masks()["stream"]


def test_a_zero_of_a_live_channel_when_healing_begins_is_not_held():
    """A bias that is still zero in a live channel goes on training."""
    model = Stream()
    with torch.no_grad():
        model.bias.zero_()
    groups = model.groups()
    optimizer = wrapped(model, "plain", 0, 1, groups)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    dead = model.dead()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert (model.bias == 0).nonzero().squeeze(1).tolist() == dead


def test_the_mask_is_not_chosen_again():
    model = Stream()
    optimizer = healed(model)
    dead = model.dead()
    live = next(c for c in range(8) if c not in dead)
    with torch.no_grad():
        for part in model.slices(live):
            part.mul_(1e-12)
    train(optimizer, list(model.parameters()), 3)
    assert model.dead() == dead


def test_what_others_write_is_zeroed_again():
    """A merged adapter, or a dense state dictionary loaded in the middle: the next step restores the mask."""
    model = Stream()
    optimizer = healed(model)
    dead = model.dead()
    with torch.no_grad():
        model.up.add_(torch.randn(12, 2) @ torch.randn(2, 8))
    train(optimizer, list(model.parameters()), 1)
    assert model.dead() == dead
    model.load_state_dict(Stream(seed=5).state_dict())
    assert model.dead() == []
    train(optimizer, list(model.parameters()), 1)
    assert model.dead() == dead


def test_nan_gradients_of_frozen_channels_do_no_harm():
    model = Stream()
    optimizer = healed(model, "adamw")
    dead = model.dead()
    gradients(list(model.parameters()), 2)
    model.up.grad[:, dead[0]] = float("nan")
    optimizer.step()
    assert model.dead() == dead
    assert optimizer.state[model.up]["exp_avg"].isfinite().all()


def test_gradients_and_moments_of_frozen_channels():
    """The base optimizer sees zero gradients there, so that moments fade; closures cannot bring others in."""
    model = Stream()
    optimizer = healed(model, "sgd")
    dead = model.dead()
    before = optimizer.state[model.up]["momentum_buffer"][:, dead].clone()
    assert before.any()

    def closure():
        gradients(list(model.parameters()), 2)
        return torch.zeros(())

    closure()
    optimizer.step(closure)
    assert not model.up.grad[:, dead].any()
    assert_same(optimizer.state[model.up]["momentum_buffer"][:, dead], before * 0.9)


def test_sparse_gradients():
    """A gradient that is not dense is left alone; the weights are zeroed after the step."""
    table = nn.Embedding(10, 8, sparse=True)
    group = {
        "params": list(table.parameters()),
        "prox_type": "CoupledMinSparsityConstraint",
        "couple_key": "c",
        "group_type": "Dim1Grouper",
        "min_sparsity": 0.5,
    }
    optimizer = PruneOptimizer(torch.optim.SparseAdam([group], lr=0.1), healing_start_step=2)
    for _ in range(5):
        optimizer.zero_grad()
        table(torch.tensor([1, 3, 3])).square().sum().backward()
        optimizer.step()
        assert int((table.weight == 0).all(0).sum()) == 4


ELEMENTWISE = {
    "ProxLasso": {"group_type": "ElemGrouper", "reg_lambda": 20.0},
    "ProxGroupLasso": {"group_type": "Dim0Grouper", "reg_lambda": 24.0},
    "NMSparseConstraint": {"group_type": "KElementGrouper", "k": 4, "n_nonzero": 2},
    "MinSparsityConstraint": {"group_type": "KElementGrouper", "k": 1, "min_sparsity": 0.4},
    "GlobalMinSparsityConstraint": {"group_type": "Dim1Grouper", "min_sparsity": 0.4},
}


@pytest.mark.parametrize("prox_type", ELEMENTWISE)
@pytest.mark.parametrize("latent", [True, False], ids=["latent", "direct"])
@pytest.mark.parametrize("resume", [False, True], ids=["in one process", "resumed"])
def test_ordinary_projections_stay_frozen(prox_type, latent, resume):
    """Literal zeros of soft and of n:m projections, channels of budgets."""

    def make():
        values = [torch.randn(s, generator=torch.Generator().manual_seed(sum(s))) for s in ((12, 8), (8, 16))]
        for x in values:
            x[0] *= 50  # survives any shrinking
        return list(map(nn.Parameter, values))

    def build(ps):
        group = {"params": ps, "prox_type": prox_type, **ELEMENTWISE[prox_type]}
        return PruneOptimizer(BASES["adamw"]([group]), 0, 2, latent_weights=latent)

    ps = make()
    optimizer = build(ps)
    train(optimizer, ps, 2)
    zeros = [(p == 0) for p in ps]
    assert all(0 < z.sum() < z.numel() for z in zeros)
    for n in range(2, 8):
        if resume and n == 4:
            twins = make()
            for twin, p in zip(twins, ps, strict=True):
                twin.data.copy_(p)
            state_dict = copy.deepcopy(optimizer.state_dict())
            optimizer, ps = build(twins), twins
            optimizer.load_state_dict(state_dict)
        with torch.no_grad():
            live = (~zeros[0]).nonzero()[0]
            ps[0][tuple(live)] = 0.0
        gradients(ps, n)
        optimizer.step()
        assert all((bits(p)[z.numpy()] == 0).all() for p, z in zip(ps, zeros, strict=True))
        assert ps[0][tuple(live)] != 0


@pytest.mark.parametrize("packed", [False, True])
def test_ranks_are_cut_again(packed):
    """Dense low-rank weights have no zeros to freeze: the projection is repeated, and can be switched off."""
    ranks = {}
    for through in (None, False):
        p = nn.Parameter(torch.randn((24, 8), generator=torch.Generator().manual_seed(0)))
        group = {"params": [p], "prox_type": "MinRankConstraint", "min_sparsity": 0.5}
        group |= {"group_type": "PackedSVDGrouper", "npack": 3} if packed else {"group_type": "SVDGrouper"}
        group |= {} if through is None else {"prox_through_heal": through}
        optimizer = PruneOptimizer(BASES["adamw"]([group]), 0, 2)
        train(optimizer, [p], 6)
        parts = p.detach().view(3, 8, 8) if packed else p.detach()
        ranks[through] = torch.linalg.matrix_rank(parts, rtol=1e-4).tolist()
        assert ("frozen" in optimizer.state[p]) == (through is False)
    assert ranks == {None: [4] * 3, False: [8] * 3} if packed else {None: 4, False: 8}


def test_a_run_from_elsewhere():
    """A state that carries no frozen set (TorchAO's, or an older schedule's) freezes what is zero when it comes."""
    model, other = Stream(), Stream()
    optimizer = healed(model)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for values in state_dict["state"].values():
        values.pop("frozen", None)
    state_dict["param_groups"][0].pop("frozen_set")
    twin = wrapped(other, "adamw", 0, 2)
    other.load_state_dict(model.state_dict())
    twin.load_state_dict(state_dict)
    for m, o in ((model, optimizer), (other, twin)):
        train(o, list(m.parameters()), 4)
    assert_same(snapshot(twin)[0], snapshot(optimizer)[0])
    assert twin.masks() == optimizer.masks()


def test_healing_may_begin_earlier_or_later_than_planned():
    """Resumed with an earlier start, the zeros of that moment are frozen; with a later one, pruning goes on."""
    model = Stream()
    optimizer = wrapped(model, "adamw", 0, 9)
    train(optimizer, list(model.parameters()), 5)
    dead = model.dead()
    earlier, later = Stream(), Stream()
    for m, start in ((earlier, 4), (later, 7)):
        twin = wrapped(m, "adamw", 0, start)
        m.load_state_dict(model.state_dict())
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(twin, list(m.parameters()), 4)
        assert len(m.dead()) == 4
        if start == 4:
            assert m.dead() == dead
    final = wrapped(model, "adamw", 0, 20)
    final.load_state_dict(copy.deepcopy(twin.state_dict()))
    assert final.phase == "pruning"
    model.load_state_dict(later.state_dict())
    train(final, list(model.parameters()), 12)
    assert final.phase == "healing"
    assert final.masks()["stream"] == model.dead()


def test_masks_are_plain_and_move_to_a_fresh_model():
    model, fresh = Stream(), Stream(seed=3)
    optimizer = healed(model)
    masks = json.loads(json.dumps(optimizer.masks()))
    members = [Member(fresh.embed, "Dim1Grouper"), Member(fresh.up, "Dim1Grouper"), Member(fresh.down, "Dim0Grouper")]
    members += [Member(fresh.bias, "Dim0Grouper"), Member(fresh.gain, "Dim0Grouper")]
    apply_masks_(Cluster("stream", members, 0.5), masks)
    assert fresh.dead() == model.dead()


def test_after_healing_the_base_optimizer_goes_on_alone():
    """Documented: moments of pruned channels fade with the others, so a bare base may move what was pruned."""
    model = Stream()
    optimizer = healed(model, "plain")
    train(optimizer, list(model.parameters()), 2)
    dead = model.dead()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.base_optimizer.step()
    assert model.dead() == dead


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 63, 1000])
def test_packed_bits(n):
    chosen = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.3
    packed = pack(chosen)
    assert packed.numel() == -(-n // 8)
    assert torch.equal(unpack(packed, n), chosen)
    assert sum(bin(byte).count("1") for byte in packed.tolist()) == int(chosen.sum())


def test_frozen_set_takes_little_memory():
    """A bit a channel for budgets, a bit an element for soft projections."""
    model = Stream()
    optimizer = healed(model)
    assert optimizer.state[model.embed]["frozen"].nbytes == 1
    p = nn.Parameter(torch.randn(16, 16))
    group = {"params": [p], "prox_type": "ProxLasso", "group_type": "ElemGrouper", "reg_lambda": 1.0}
    optimizer = PruneOptimizer(BASES["adamw"]([group]), 0, 1)
    train(optimizer, [p], 2)
    assert optimizer.state[p]["frozen"].nbytes == 32
