"""Patterns and views: weights on single keys, compared with the matrices of eager attention."""

import base64
import itertools
import math

import pytest
import torch

import regard
from regard.inspection import views
from support.checkpoints import stories260k
from support.models import build, inputs_of, padded
from support.recorded import tokens


@pytest.fixture(scope="module")
def stories():
    return stories260k()


@pytest.mark.parametrize("side", [None, "right"])
def test_patterns_are_exact(stories, side):
    """The weight on the query's own key, on the one before, and on those that follow an earlier copy of its token."""
    given = {"input_ids": tokens(12, 2, 60)}
    real = torch.ones(2, 60, dtype=torch.bool)
    if side is not None:
        given["attention_mask"] = padded(side, 2, 60)
        real = given["attention_mask"].bool()
    eager = stories260k(attn_implementation="eager")
    with torch.no_grad():
        attentions = eager(**given, output_attentions=True).attentions
    ids = given["input_ids"]
    follows = torch.zeros(2, 60, 60, dtype=torch.bool)
    follows[:, :, 1:] = ids[:, :, None] == ids[:, None, :-1]  # the key before is a copy of the query's token
    follows &= torch.ones(60, 60, dtype=torch.bool).tril() & real[:, None]
    found = regard.inspect(stories, given, patterns=True)
    for layer, p in enumerate(attentions):
        p, counted = p.double(), real[:, None].expand(2, 8, 60)
        some = counted & follows.any(-1)[:, None]
        induction = ((p * follows[:, None]).sum(-1) * some).sum((0, 2)) / some.sum((0, 2))
        own = (p.diagonal(dim1=-2, dim2=-1) * counted).sum((0, 2)) / counted.sum((0, 2))
        before = (p.diagonal(-1, -2, -1) * counted[..., 1:]).sum((0, 2)) / counted[..., 1:].sum((0, 2))
        for name, expected in (("induction", induction), ("self_token", own), ("previous_token", before)):
            assert torch.allclose(found.mean(name)[layer], expected, rtol=2e-4, atol=2e-5), (name, layer)


def test_views_show_the_plan(stories):
    ids = tokens(512, 1, 70)
    record = regard.inspect(stories, ids, views=True).record()
    eager = stories260k(attn_implementation="eager")
    with torch.no_grad():
        attentions = torch.cat(eager(ids, output_attentions=True).attentions, 1)[0]  # [layers * H, T, T]
    window, top, paths = record["window"], record["top_keys"], record["paths"]
    assert window["tokens"] == [str(i) for i in ids[0, :48].tolist()]
    for text, p in zip(window["weights"], attentions, strict=True):
        shown = torch.tensor(list(base64.b64decode(text))).view(48, 48).double() / 255
        assert (shown - p[:48, :48].double().sqrt()).abs().max() < 0.003
    weights, keys = attentions[:, top["queries"]].topk(8)
    assert torch.allclose(torch.tensor(top["weights"]), weights, rtol=1e-2, atol=1e-4)
    clear = weights[..., 0] > 1.01 * weights[..., 1]
    assert torch.equal(torch.tensor(top["keys"])[..., 0][clear], keys[..., 0][clear])
    chosen = attentions[:, top["queries"][:: -math.ceil(len(top["queries"]) / 8)]].double()
    assert paths["rows"] == chosen.shape[1] == 8
    at_one = paths["temperature"].index(1.0)
    entropy = -torch.xlogy(chosen, chosen).sum(-1).mean(-1)
    assert torch.allclose(torch.tensor(paths["entropy"])[:, at_one].double(), entropy, rtol=1e-3, atol=1e-4)
    assert all(a <= b + 1e-6 for row in paths["entropy"] for a, b in itertools.pairwise(row))
    assert all(a >= b - 1e-4 for row in paths["expected_score"] for a, b in itertools.pairwise(row))


def shown_map(text, cells):
    """The mass between blocks, from the bytes of a map, and whether it has the keys up to the query only."""
    found = torch.tensor(list(base64.b64decode(text))).double() / 255
    if len(found) == cells * cells:
        return found.view(cells, cells) ** 2, False
    square = torch.zeros(cells, cells, dtype=torch.double)
    square[torch.ones(cells, cells, dtype=torch.bool).tril()] = found**2
    return square, True


def pooled(weights, block):
    """The mean over each block's queries of the mass on each block's keys."""
    cells = -(-weights.shape[-1] // block)
    parts = [[w.sum(-1).mean(-1) for w in rows.split(block, -1)] for rows in weights.double().split(block, -2)]
    return torch.stack([torch.stack(row, -1) for row in parts], -2).view(-1, cells, cells)


def test_the_map_is_the_plan_of_the_whole_sequence_in_blocks(stories):
    ids = tokens(512, 2, 301)  # the last block has one token
    record = regard.inspect(stories, ids, views=True).record()  # of the first sequence
    eager = stories260k(attn_implementation="eager")
    with torch.no_grad():
        attentions = torch.cat(eager(ids[:1], output_attentions=True).attentions, 1)[0]
    found = record["map"]
    assert (found["block"], found["length"], len(found["weights"])) == (3, 301, 40)
    assert found["texts"][1] == " ".join(map(str, ids[0, 3:6].tolist()))
    for text, expected in zip(found["weights"], pooled(attentions, 3), strict=True):
        shown, triangle = shown_map(text, 101)
        assert triangle and (shown.sqrt() - expected.sqrt()).abs().max() < 0.003


def test_the_map_of_a_model_that_reads_ahead():
    model, ids = build("bert"), tokens(64, 1, 50)
    found = regard.inspect(model, {"input_ids": ids}, views=True).record()["map"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = torch.cat(model(ids, output_attentions=True).attentions, 1)[0]
    for text, expected in zip(found["weights"], pooled(attentions, 1), strict=True):
        shown, triangle = shown_map(text, 50)
        assert not triangle and (shown.sqrt() - expected.sqrt()).abs().max() < 0.003


def test_the_maps_are_small(stories, monkeypatch):
    """At most 128 blocks, fewer if the model has many heads, and none if the window shows all."""
    assert "map" not in regard.inspect(stories, tokens(512, 1, 48), views=True).views
    assert regard.inspect(stories, tokens(512, 1, 49), views=True).views["map"]["block"] == 1
    assert regard.inspect(stories, tokens(512, 1, 130), views=True).views["map"]["block"] == 2
    sizes = {heads: -(-8192 // views._block(8192, heads)) for heads in (40, 270, 1024, 5120, 10**6)}
    assert sizes == {40: 128, 270: 128, 1024: 76, 5120: 34, 10**6: 32}
    monkeypatch.setattr(views, "MAP_BYTES", 40 * 50 * 51 // 2)
    found = regard.inspect(stories, tokens(512, 1, 300), views=True).views["map"]
    assert found["block"] == 6 and sum(len(base64.b64decode(text)) for text in found["weights"]) <= views.MAP_BYTES


def test_views_need_one_sequence_for_all_layers():
    for kind in ("t5", "whisper"):
        model = build(kind)
        found = regard.inspect(model, inputs_of(kind), patterns=True, views=True)
        assert found.views == {} and found.to_html()
    stories = build("llama")
    assert regard.inspect(stories, tokens(64, 2, 20), views=True).views
    padding = {"input_ids": tokens(64, 2, 20), "attention_mask": padded("left", 2, 20)}
    assert regard.inspect(stories, padding, views=True).views == {}


def test_views_cannot_be_added_to_a_run(tmp_path):
    """They show the first sequence, which a resumed run does not see again."""
    run, batches = tmp_path / "run.safetensors", [tokens(64, 1, 12, n) for n in range(2)]
    model = build("llama")
    regard.inspect(model, batches, run=run)
    with pytest.raises(ValueError, match=r"views: expected False, as '.*run.safetensors' was begun without them"):
        regard.inspect(model, batches, run=run, views=True)
    regard.inspect(model, batches, run=run)
    run.unlink()
    viewed = regard.inspect(model, batches, run=run, views=True)
    assert viewed.views and regard.inspect(model, batches, run=run, views=True).views == viewed.views
    run.unlink()
    padding = {"input_ids": tokens(64, 2, 20), "attention_mask": padded("left", 2, 20)}
    for _ in range(2):  # asked for, but there are none
        assert regard.inspect(model, padding, run=run, views=True).views == {}


def test_first_key_mass_counts_queries_that_see_the_key():
    """A window hides the first key from most queries, which do not count."""
    model = build("mistral")
    window = model.config.sliding_window
    found = regard.inspect(model, tokens(64, 1, 100), statistics=["first_key_mass", "entropy"])
    for layer in found.layers:
        seen = layer.counts[:, layer.channels.index("first_key_mass")].sum(0)
        assert seen.tolist() == [window] * layer.heads and layer.rows.sum(0).tolist() == [100] * layer.heads
