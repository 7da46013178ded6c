"""The demo: its command line in a process of its own, and what one pruning does to a forward pass."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
import torch

from coupled_prune import prune_
from coupled_prune.__main__ import main
from coupled_prune.demo import (
    BYTES,
    Sizes,
    Transformer,
    clusters_of,
    pruned,
    read_sources,
    report,
    train,
    validation_loss,
)

TINY = Sizes(width=32, layers=2, heads=4, hidden=48, context=32, batch=4, steps=6, validation_windows=8)
KEYS = ["residual", *(f"layers.{i}.{part}" for i in range(TINY.layers) for part in ("feed_forward", "heads"))]


@pytest.fixture(scope="module")
def quick():
    pytest.importorskip("tqdm")
    command = [sys.executable, "-m", "coupled_prune", "--quick"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_quick_run_succeeds_and_names_every_cluster(quick):
    assert quick.returncode == 0, quick.stderr
    for key in KEYS:
        assert re.search(rf"^{re.escape(key)} +\d+ +\d+ +\d+ +25\.0%$", quick.stdout, re.MULTILINE), quick.stdout


def test_quick_run_compares_the_paths(quick):
    assert "the fast and the reference path chose the same channels in all 5 clusters" in quick.stdout
    assert re.search(r"fast path [\d.]+ ms, reference path [\d.]+ ms, ratio [\d.]+", quick.stdout)


def test_quick_run_learns_and_reports_both_losses(quick):
    losses = dict(re.findall(r"validation loss (before|after) +pruning: (\S+) nats", quick.stdout))
    before, after = float(losses["before"]), float(losses["after"])
    assert math.isfinite(after)
    assert before < math.log(BYTES)


def test_quick_run_shows_its_progress(quick):
    assert "40/40" in quick.stderr
    assert "loss" in quick.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparsity", "1.5"], "--sparsity: must be in [0, 1], got 1.5"),
        (["--sparsity", "-0.1"], "--sparsity: must be in [0, 1], got -0.1"),
        (["--sparsity", "nan"], "--sparsity: must be in [0, 1], got nan"),
        (["--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--seed", "-1"], "--seed: must be in [0, 2**63), got -1"),
    ],
)
def test_wrong_options_exit_with_2_and_say_why(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--quick", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_without_tqdm_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(SystemExit) as exit_:
        main(["--quick"])
    assert "pip install 'coupled-prune[demo]'" in exit_.value.code
    assert "\n" not in exit_.value.code


def test_python_without_sources_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        read_sources(tmp_path)


def test_the_last_tenth_of_the_sorted_sources_is_validation(tmp_path):
    (tmp_path / "json").mkdir()
    (tmp_path / "b.py").write_bytes(b"bbbb")
    (tmp_path / "a.py").write_bytes(b"aaaa")
    (tmp_path / "json" / "c.py").write_bytes(b"c" * 10)
    training, validation = (bytes(part.tolist()) for part in read_sources(tmp_path))
    assert training == b"aaaa\nbbbb\ncccccccc"
    assert validation == b"cc"


def losses(seed):
    training, validation = read_sources()
    model = Transformer(TINY, seed)
    steps = list(train(model, training, TINY, seed))
    outcome = report(model, validation, TINY, 0.25)
    return [*steps, outcome.before, outcome.after]


def test_a_seed_gives_the_same_losses_twice():
    assert losses(3) == losses(3)
    assert losses(3) != losses(4)


def test_report_leaves_the_model_as_it_is_and_names_different_choices():
    model = Transformer(TINY)
    before = [parameter.clone() for parameter in model.parameters()]
    outcome = report(model, torch.arange(200, dtype=torch.uint8), TINY, 0.25)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert outcome.different == []
    outcome.reference.result["layers.1.heads"].mask.logical_not_()
    assert outcome.different == ["layers.1.heads"]
    assert "DIFFERENT channels in layers.1.heads" in str(outcome)


@pytest.fixture(scope="module")
def forward():
    """A pruned model's masks, and by module name what went into it and came out of it in one forward pass."""
    model = Transformer(TINY)
    with torch.no_grad():  # unequal gains, so that a channel is zero because its gain and its writers are
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    result = prune_(clusters_of(model, TINY, 0.25))
    inputs, outputs = {}, {}

    def record(name):
        def hook(_module, args, output):
            inputs[name], outputs[name] = args[0].detach(), output.detach()

        return hook

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(record(name))
    model(torch.randint(BYTES, (3, TINY.context), generator=torch.Generator().manual_seed(0)))
    return model, result, inputs, outputs


def test_clusters_cover_every_parameter():
    model = Transformer(TINY)
    clusters = clusters_of(model, TINY, 0.25)
    assert [cluster.key for cluster in clusters] == KEYS
    assert {id(m.parameter) for m in clusters[0].members} == {id(p) for p in model.parameters()}
    unscored = {m.name for cluster in clusters for m in cluster.members if not m.scored}
    assert unscored == {name for name, _ in model.named_parameters() if name.endswith("norm.weight")}


@pytest.mark.parametrize(
    "name", ["embedding", *(f"layers.{i}" for i in range(TINY.layers)), "layers.0.attention_norm", "norm"]
)
def test_pruned_residual_channels_are_exactly_zero_all_the_way(forward, name):
    _, result, _, outputs = forward
    assert_zero_only_in(outputs[name], result["residual"].mask)


@pytest.mark.parametrize("i", range(TINY.layers))
def test_pruned_feed_forward_channels_are_exactly_zero(forward, i):
    _, result, inputs, _ = forward
    assert_zero_only_in(inputs[f"layers.{i}.feed_forward.down"], result[f"layers.{i}.feed_forward"].mask)


@pytest.mark.parametrize("i", range(TINY.layers))
def test_pruned_heads_give_nothing_and_are_read_by_nobody(forward, i):
    model, result, inputs, _ = forward
    mask = result[f"layers.{i}.heads"].mask
    lanes = mask.repeat_interleave(TINY.head_dim)
    assert_zero_only_in(inputs[f"layers.{i}.attention.output"], lanes)
    assert mask.sum() == 1
    assert not model.get_parameter(f"layers.{i}.attention.output.weight")[:, lanes].any()


def assert_zero_only_in(activations, mask):
    """Channels in `mask`, bool (channels,), are zero everywhere in (..., channels); no other one is."""
    assert mask.any()
    assert torch.equal((activations == 0).flatten(0, -2).all(0), mask)


def test_logits_do_not_depend_on_pruned_channels(forward):
    model, result, _, _ = forward
    x = torch.arange(TINY.context).unsqueeze(0)
    expected = model(x)
    hook = model.norm.register_forward_hook(lambda _m, _a, output: output + 5.0 * result["residual"].mask)
    assert torch.equal(model(x), expected)
    hook.remove()


def test_zeroing_everything_leaves_a_uniform_guess():
    training, validation = read_sources()
    model = Transformer(TINY)
    list(train(model, training, TINY))
    with pytest.warns(UserWarning, match="channels are zeroed"):
        outcome = pruned(model, TINY, 1.0, "fast")
    assert validation_loss(outcome.model, validation, TINY) == pytest.approx(math.log(BYTES), rel=1e-5)
