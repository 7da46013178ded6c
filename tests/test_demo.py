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
from coupled_prune.demo.model import BYTES, Sizes, Transformer, read_sources
from coupled_prune.demo.report import plot, pruned, report, running_mean
from coupled_prune.demo.training import clusters_of, dense_optimizer, pruning_optimizer, train, validation_loss

TINY = Sizes(width=32, layers=2, heads=4, hidden=48, context=32, batch=4, steps=6, validation_windows=8)
KEYS = ["residual", *(f"layers.{i}.{part}" for i in range(TINY.layers) for part in ("feed_forward", "heads"))]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    picture = tmp_path_factory.mktemp("demo") / "picture.png"
    command = [sys.executable, "-m", "coupled_prune", "--quick", "--plot", str(picture)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    run.picture = picture
    return run


def test_quick_run_succeeds_and_names_every_cluster(quick):
    assert quick.returncode == 0, quick.stderr
    for key in KEYS:
        assert re.search(rf"^{re.escape(key)} +\d+ +\d+ +\d+ +50\.0%$", quick.stdout, re.MULTILINE), quick.stdout


def test_quick_run_compares_the_paths(quick):
    assert "the fast and the reference path chose the same channels in all 5 clusters" in quick.stdout
    assert re.search(r"fast path [\d.]+ ms, reference path [\d.]+ ms, ratio [\d.]+", quick.stdout)


def test_quick_run_learns_and_compares_at_equal_sparsity(quick):
    rows = dict(re.findall(r"^(dense|pruned \w+ .*?) {2,}(.*)$", quick.stdout, re.MULTILINE))
    zeros, losses, _ = zip(*(row.split() for row in rows.values()), strict=True)
    assert list(rows) == ["dense", "pruned once at the end", "pruned while training"]
    assert zeros[0] == "0.0%"
    assert zeros[1] == zeros[2] != "0.0%"
    assert all(float(loss) < math.log(BYTES) for loss in losses)


def test_quick_run_shows_its_progress(quick):
    assert quick.stderr.count("40/40") == 2
    for word in ("loss", "healing", "% zero"):
        assert word in quick.stderr


def test_quick_run_writes_a_picture(quick):
    assert quick.picture.read_bytes().startswith(b"\x89PNG")
    assert f"picture: {quick.picture}" in quick.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparsity", "1.5"], "--sparsity: must be in [0, 1], got 1.5"),
        (["--sparsity", "-0.1"], "--sparsity: must be in [0, 1], got -0.1"),
        (["--sparsity", "nan"], "--sparsity: must be in [0, 1], got nan"),
        (["--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--seed", "-1"], "--seed: must be in [0, 2**63), got -1"),
        (["--plot", "no/such/folder/x.png"], "--plot: no/such/folder is not a folder"),
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


def outcome_of(seed=0, sparsity=0.25):
    """Both trainings of the demo, and their report."""
    training, validation = read_sources()
    dense, pruning = Transformer(TINY, seed), Transformer(TINY, seed)
    optimizer = pruning_optimizer(pruning, TINY, sparsity)
    steps = [
        list(train(model, o, training, TINY, seed))
        for model, o in ((dense, dense_optimizer(dense)), (pruning, optimizer))
    ]
    return steps, report(dense, pruning, optimizer.masks(), validation, TINY, sparsity), (dense, pruning)


def losses(seed):
    steps, outcome, _ = outcome_of(seed)
    run = [step.loss for run in steps for step in run]
    return [*run, outcome.dense, outcome.at_the_end, outcome.on_the_way]


def test_a_seed_gives_the_same_losses_twice():
    assert losses(3) == losses(3)
    assert losses(3) != losses(4)


def test_pruning_while_training():
    """Warmup is the dense run; then zeros grow to those of the clusters, and stay."""
    (dense, pruning), outcome, _ = outcome_of()
    assert [step.phase for step in pruning] == ["pruning"] * 3 + ["healing"] * 3
    assert pruning[0].loss == dense[0].loss
    sparsity = [step.sparsity for step in pruning]
    assert sparsity == sorted(sparsity)
    assert sparsity[-1] == pytest.approx(outcome.fast.result.sparsity)
    assert outcome.pruned_on_the_way.sparsity == pytest.approx(outcome.fast.result.sparsity)
    assert [len(ids) for ids in outcome.pruned_on_the_way.masks().values()] == [8, 12, 1, 12, 1]


def test_groups_say_what_the_clusters_say():
    """The optimizer's groups hold the same members on the same axes as the clusters of one call."""
    model = Transformer(TINY)
    optimizer = pruning_optimizer(model, TINY, 0.25)
    stages = optimizer._settings.stages(optimizer.param_groups)
    describe = lambda c: {(id(m.parameter), m.grouper, m.scored) for m in c.members}  # noqa: E731
    ours = {stage.cluster.key: describe(stage.cluster) for stage in stages.coupled}
    assert ours == {cluster.key: describe(cluster) for cluster in clusters_of(model, TINY, 0.25)}


def test_report_leaves_the_models_as_they_are_and_names_different_choices():
    _, outcome, models = outcome_of()
    before = [parameter.clone() for model in models for parameter in model.parameters()]
    assert outcome.different == []
    report(*models, outcome.pruned_on_the_way.masks(), torch.arange(200, dtype=torch.uint8), TINY, 0.25)
    after = [parameter for model in models for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    outcome.reference.result["layers.1.heads"].mask.logical_not_()
    assert outcome.different == ["layers.1.heads"]
    assert "DIFFERENT channels in layers.1.heads" in str(outcome)


def test_running_mean():
    assert running_mean([1.0, 2.0, 3.0, 6.0], 2) == [1.0, 1.5, 2.5, 4.5]


def test_one_step(tmp_path):
    """The shortest run prunes in its only step and can be drawn."""
    pytest.importorskip("matplotlib")
    one = Sizes(width=32, layers=1, heads=4, hidden=48, context=32, batch=4, steps=1, validation_windows=8)
    training, validation = read_sources()
    dense, pruning = Transformer(one), Transformer(one)
    optimizer = pruning_optimizer(pruning, one, 0.5)
    runs = [list(train(m, o, training, one)) for m, o in ((dense, dense_optimizer(dense)), (pruning, optimizer))]
    outcome = report(dense, pruning, optimizer.masks(), validation, one, 0.5)
    plot(*runs, outcome, str(tmp_path / "one.svg"))
    assert (tmp_path / "one.svg").read_text().count("pruned while training") == 2


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
    list(train(model, dense_optimizer(model), training, TINY))
    with pytest.warns(UserWarning, match="channels are zeroed"):
        outcome = pruned(model, TINY, 1.0, "fast")
    assert validation_loss(outcome.model, validation, TINY) == pytest.approx(math.log(BYTES), rel=1e-5)
