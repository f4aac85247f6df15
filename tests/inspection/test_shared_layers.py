"""Layers that share their weights: a module that a pass calls several times is several layers, told apart by depth."""

import json

import pytest
import torch
import transformers
from rich.progress import Progress
from torch import nn
from torch.utils.checkpoint import checkpoint

import regard
from regard import Inspection
from support.models import TEXT
from support.recorded import numbers

ALBERT = TEXT | {"embedding_size": 16, "num_hidden_layers": 6, "attn_implementation": "eager"}


def _albert(**changes):
    torch.manual_seed(0)
    model = transformers.AlbertForMaskedLM(transformers.AlbertConfig(**ALBERT | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4  # so that the layers differ
    return model


def _entropies(model, tokens):
    """[layers, heads], from the weights that transformers returns."""
    with torch.no_grad():
        weights = model(tokens, output_attentions=True).attentions
    return torch.stack([-(p * p.clamp(min=1e-30).log()).sum(-1).mean((0, 2)) for p in weights]).double()


@pytest.mark.parametrize(
    ("groups", "inner"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)], ids=lambda n: str(n)
)  # A A A A A A; A A A B B B; A A B B C C; A B A B ...; A B A B A B C D ...
def test_shared_layers_are_told_apart_by_depth(groups, inner):
    model, tokens = _albert(num_hidden_groups=groups, inner_group_num=inner), torch.randint(64, (2, 20))
    seen = regard.inspect(model, tokens)
    depth = 6 * inner
    assert [layer.index for layer in seen.layers] == list(range(depth)) and seen.rows == 40
    names = [layer.name for layer in seen.layers]
    assert len(set(names)) == depth and sum("(call " in name for name in names) == depth - groups * inner
    if inner == 1:  # transformers returns one matrix per group otherwise
        torch.testing.assert_close(seen.mean("entropy"), _entropies(model, tokens), rtol=1e-4, atol=1e-5)
    assert {found.layer for found in seen.findings() if found.layer is not None} <= set(range(depth))
    assert len(seen.to_pandas()) == depth * 4
    assert seen.summary().startswith(f"AlbertForMaskedLM: {depth} attention layers, 40 queries each")


def test_several_batches_and_a_resumed_run(tmp_path):
    model, tokens = _albert(num_hidden_groups=2), torch.randint(64, (4, 20))
    whole = regard.inspect(model, tokens, batch_size=1)

    def interrupted():
        yield from tokens[:2].split(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regard.inspect(model, interrupted(), run=tmp_path / "run")
    assert [layer.index for layer in Inspection.load(tmp_path / "run").layers] == list(range(6))
    again = regard.inspect(model, list(tokens.split(1)), run=tmp_path / "run")
    assert [(layer.name, layer.index) for layer in again.layers] == [(la.name, la.index) for la in whole.layers]
    torch.testing.assert_close(again.mean("entropy"), whole.mean("entropy"))
    torch.testing.assert_close(whole.mean("entropy"), _entropies(model, tokens), rtol=1e-4, atol=1e-5)


def test_the_report_has_every_depth():
    seen = regard.inspect(_albert(), torch.randint(64, (1, 20)), patterns=True, views=True)
    record = seen.record()
    assert [(head["layer"], head["head"]) for head in record["heads"]] == [(n, h) for n in range(6) for h in range(4)]
    assert len(record["window"]["weights"]) == len(record["top_keys"]["keys"]) == 24


def test_a_part_that_is_called_twice_is_not_deeper():
    """Two calls of one encoder in a pass (here on two inputs) are the same layers: each call counts from the start."""

    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = transformers.BertModel(transformers.BertConfig(**TEXT)).eval()
            self.config = self.encoder.config

        def forward(self, input_ids):
            return self.encoder(input_ids)[0] + self.encoder(input_ids.flip(-1))[0]

    model = Twins()
    with regard.watch(model) as seen, torch.no_grad():
        model(torch.randint(64, (1, 20)))
    assert len(seen.layers) == 2 and seen.rows == 40


def test_a_monitor_tells_them_apart(tmp_path):
    model = _albert(num_hidden_groups=2).train()
    monitor = regard.Monitor(model, every=1, path=tmp_path / "run.jsonl", wandb=False)
    for step in range(2):
        with monitor(step):
            loss = model(torch.randint(64, (1, 20)), labels=torch.randint(64, (1, 20))).loss
            loss.backward()
        monitor.log(loss)
    run = regard.inspection.journal.read_run(tmp_path / "run.jsonl")
    assert [layer[0] for layer in run["layers"]] == list(range(6)) and run["steps"] == [0, 1]


class _Looped(nn.Module):
    """One attention, applied again and again."""

    def __init__(self, repeat):
        super().__init__()
        self.repeat = repeat
        self.attention = regard.nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        for _ in range(3):
            x = x + 4 * self.repeat(self.step, x)
        return x

    def step(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_monitor_of_own_modules_tells_them_apart(checkpointed, tmp_path):
    """Also with activation checkpointing, whose repeated calls are not deeper layers."""

    def repeat(step, x):
        return checkpoint(step, x, use_reentrant=False) if checkpointed else step(x)

    torch.manual_seed(0)
    model, x = _Looped(repeat), torch.randn(2, 10, 16)
    monitor = regard.Monitor(model, every=1, path=tmp_path / "run.jsonl", wandb=False)
    for step in range(2):
        with monitor(step):
            model(x).sum().backward()
        monitor.flush()
    layers = [(name, heads) for name, heads, _ in monitor.layout.values()]
    assert layers == [("attention", 4), ("attention (call 2)", 4), ("attention (call 3)", 4)]
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    samples = [line for line in lines if "rows" in line]
    assert [line["rows"] for line in samples] == [20, 20]
    assert len({samples[0][f"attn/entropy/L0{n}_p50"] for n in range(3)}) == 3


def test_entropies_have_one_entry_per_call():
    model, tokens = _albert(), torch.randint(64, (1, 20))
    with regard.hf.entropies(model) as rows:
        model(tokens)
    found = torch.stack([row.entropy.mean((0, 2)) for row in rows]).double().detach()
    torch.testing.assert_close(found, _entropies(model, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_run_that_is_interrupted_within_a_sequence_resumes(tmp_path, stop):
    """The numbers and the order of the layers are those of an uninterrupted run, wherever it ended."""
    model, batches = _albert(num_hidden_groups=2), list(torch.randint(64, (2, 1, 20)))
    expected, run = regard.inspect(model, batches, views=True), tmp_path / "run.safetensors"
    calls = 0

    def interrupted(*_):
        nonlocal calls
        calls += 1
        if calls == stop:
            raise KeyboardInterrupt

    hooks = [group.register_forward_hook(interrupted) for group in model.albert.encoder.albert_layer_groups]
    with pytest.raises(KeyboardInterrupt):
        regard.inspect(model, batches, views=True, run=run)
    for hook in hooks:
        hook.remove()
    assert Inspection.load(run).partial is not None
    resumed = regard.inspect(model, batches, views=True, run=run)
    assert [(layer.name, layer.index) for layer in resumed.layers] == [(x.name, x.index) for x in expected.layers]
    assert numbers(resumed) == numbers(expected) and resumed.views == expected.views


def test_progress_counts_the_calls_of_shared_layers(monkeypatch):
    """How many layers there are is known after the first sequence."""
    shown, plain = [], Progress.update

    def update(self, task, **changes):
        shown.append(changes)
        plain(self, task, **changes)

    monkeypatch.setattr(Progress, "update", update)
    regard.inspect(_albert(num_hidden_layers=3), list(torch.randint(64, (2, 1, 20))), progress=True)
    assert [one["description"] for one in shown if "description" in one] == [
        "sequence 1 of 2, layer 1 of 1",
        "sequence 1 of 2, layer 2",
        "sequence 1 of 2, layer 3",
        "sequence 1 of 2",
        "sequence 2 of 2, layer 1 of 3",
        "sequence 2 of 2, layer 2 of 3",
        "sequence 2 of 2, layer 3 of 3",
        "sequence 2 of 2",
    ]
    assert {"total": 6} in shown and shown[-1]["completed"] == 6
