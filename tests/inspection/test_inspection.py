"""`regard.inspect` and `regard.watch`: the statistics of eager matrices without the matrices; models are restored."""

import base64
import copy
import itertools
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import regard
from regard import AuxRequest, Inspection, Transport, Tsallis
from regard.inspection.layers import bin_starts, position_bins
from regard.lowering import lower
from regard.statistics import ROW_STATISTICS
from support.checkpoints import smollm2, stories260k
from support.models import build, inputs_of, padded

# "The quick brown fox jumps over the lazy dog. Once upon a time", in SmolLM2's tokens
SENTENCE = [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30, 4027, 1980, 253, 655]


def from_matrices(model, given):
    """Sums over real rows of each statistic, from the weights that eager attention returns: {name: [layers, heads]}."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    outputs = {}  # of the heads, before the output projection
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda m, args: outputs.setdefault(id(m), args[0]))
    with torch.no_grad():
        attentions = model(**given, output_attentions=True).attentions
    T = given["input_ids"].shape[1]
    real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    admissible = torch.ones(T, T, dtype=torch.bool).tril() & real[:, None]
    found = {}
    for layer, p in zip(model.model.layers, attentions, strict=True):
        p = torch.where(admissible[:, None], p.double(), 0.0)
        n = admissible.sum(-1)[:, None].double()
        entropy = -torch.xlogy(p, p).sum(-1)
        heads = outputs[id(layer.self_attn.o_proj)].unflatten(-1, (p.shape[1], -1)).double().norm(dim=-1).mT
        first = real.long().argmax(-1)[:, None, None, None].expand(*p.shape[:3], 1)
        rows = {
            "entropy": entropy,
            "kl": n.log() - entropy,
            "max_weight": p.amax(-1),
            "collision": (p**2).sum(-1),
            "mass": p.sum(-1),
            "support": n.expand_as(entropy),
            "first_key_mass": p.gather(-1, first).squeeze(-1),
            "output_norm": heads,
        }
        counted = real[:, None].expand_as(entropy)
        means = {name: torch.where(counted, x, 0.0).sum((0, 2)) / counted.sum((0, 2)) for name, x in rows.items()}
        several = counted & (n > 1)
        ratio = torch.where(several, entropy / n.clamp(min=2).log(), 0.0)
        means["normalized_entropy"] = ratio.sum((0, 2)) / several.sum((0, 2))
        for name, value in means.items():
            found.setdefault(name, []).append(value)
    return {name: torch.stack(values) for name, values in found.items()}


def tokens(vocabulary, B, T, seed=0):
    return torch.randint(3, vocabulary, (B, T), generator=torch.Generator().manual_seed(seed))


def assert_means(inspection, expected, tolerance=2e-4):
    for name, value in expected.items():
        got = inspection.mean(name)
        assert got.shape == value.shape
        assert torch.allclose(got, value, rtol=tolerance, atol=tolerance), (name, (got - value).abs().max())


@pytest.fixture(scope="module")
def stories():
    return stories260k()


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_statistics_are_those_of_the_eager_matrices(stories, side):
    given = {"input_ids": tokens(512, 3, 90)}
    if side is not None:
        given["attention_mask"] = padded(side, 3, 90)
    expected = from_matrices(stories, given)
    # in one pass and in batches: means are weighted by rows
    for batch_size in (None, 1, 2):
        inspection = regard.inspect(stories, given, batch_size=batch_size)
        assert_means(inspection, expected)
        assert inspection.rows == int(given.get("attention_mask", torch.ones(3, 90)).sum())
    perturbed = expected | {"entropy": expected["entropy"] * 1.001}
    with pytest.raises(AssertionError):
        assert_means(inspection, perturbed)


def test_smollm2():
    """A real checkpoint: the logits are those of sdpa, the statistics those of eager."""
    model = smollm2()
    given = {"input_ids": torch.tensor([SENTENCE * 3])}
    with torch.no_grad():
        plain = model(**given).logits
        model.set_attn_implementation(regard.hf.register())
        assert torch.allclose(model(**given).logits, plain, atol=1e-3)
        model.set_attn_implementation("sdpa")
    inspection = regard.inspect(model, given)
    assert_means(inspection, from_matrices(model, given), 1e-3)
    assert inspection.to_pandas().shape[0] == 30 * 9
    assert float(inspection.mean("first_key_mass").mean()) > 0.3  # SmolLM2 has many sinks


def test_every_statistic_is_the_mean_of_what_attention_returns(monkeypatch):
    """Compared with AuxRequest on the same calls; the test counts the rows itself."""
    model, given = build("gpt_oss"), inputs_of("gpt_oss", "right")
    seen = []
    plain = regard.attention

    def kept(**call):
        seen.append({k: v for k, v in call.items() if k != "return_aux"})
        return plain(**call)

    monkeypatch.setattr("regard.hf.calls.attention", kept)
    inspection = regard.inspect(model, given)
    assert len(seen) == 2 and inspection.statistics == tuple(n for n in ROW_STATISTICS if n != "key_mass")
    real = given["attention_mask"].bool()[:, None]
    for n, call in enumerate(seen):
        _, aux = regard.attention(**call, return_aux=AuxRequest.all(), backend="torch")
        valid = real & (aux.max_scores > -math.inf)
        for name in inspection.statistics:
            value, counted = getattr(aux, name).double(), valid
            if name == "first_key_mass":  # over the queries that may read that key
                counted = valid & lower(**call).admissible(20, 20, torch.device("cpu"))[..., 0]
            mean = torch.where(counted, value, 0.0).sum((0, 2)) / counted.sum((0, 2))
            assert torch.allclose(inspection.mean(name)[n], mean, rtol=1e-4, atol=1e-4), name
            highest = torch.where(valid, value, -math.inf).amax((0, 2))
            assert torch.allclose(inspection.maximum(name)[n], highest, rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_key_mass_is_the_mean_weight_on_a_key(stories, side):
    given = {"input_ids": tokens(512, 2, 14), "attention_mask": padded(side or "none", 2, 14)}
    inspection = regard.inspect(stories, given, statistics=["key_mass"])
    model = copy.deepcopy(stories)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**given, output_attentions=True).attentions
    real = given["attention_mask"].bool()
    sees = torch.ones(14, 14, dtype=torch.bool).tril() & real[:, None] & real[:, :, None]
    standing = (real.cumsum(-1) - 1).clamp(min=0)
    for layer, p in zip(inspection.layers, weights, strict=True):
        p = torch.where(sees[:, None], p.double(), 0.0).sum(2)  # [B, H, Tk]
        viewers = sees.sum(1).double()
        for position in range(14):
            here = (standing == position) & real
            expected = (p * here[:, None]).sum((0, 2)) / (viewers * here).sum()
            assert torch.allclose(layer.profile()["key_mass"][position], expected, atol=1e-5)


def test_the_profile_is_by_position(stories):
    given = {"input_ids": tokens(512, 1, 300)}
    inspection = regard.inspect(stories, given)
    layer = inspection.layers[0]
    starts = bin_starts(len(layer.rows))
    assert layer.rows[:, 0].tolist() == [min(b, 300) - a for a, b in itertools.pairwise(starts)]
    profile = layer.profile()
    assert torch.allclose(profile["support"][:16, 0], torch.arange(1.0, 17).double())
    assert torch.allclose(profile["log_keys"][5], torch.tensor(6.0).double().log().expand(8))
    assert profile["entropy"][0].abs().max() < 1e-6  # one key


def test_bins():
    starts = bin_starts(200)
    positions = torch.arange(5000)
    bins = position_bins(positions)
    assert torch.equal(bins[:17], torch.arange(17)) and (bins.diff() >= 0).all() and int(bins.max()) < 90
    for position in (0, 15, 16, 17, 100, 1023, 1024, 4095, 4096):
        b = int(bins[position])
        assert starts[b] <= position < starts[b + 1]


# --- other problems, other models -------------------------------------------------------------------------------------


def test_a_model_on_another_problem_is_inspected_as_it_is():
    name = regard.hf.register("regard-sparse", Transport(Tsallis(2.0)))
    model, given = build("llama"), inputs_of("llama", "left")
    model.set_attn_implementation(name)
    inspection = regard.inspect(model, given)
    assert "lse" not in inspection.statistics and "Tsallis" in json.dumps(inspection.about)
    assert float(inspection.mean("support").max()) < 6  # of 10 admissible keys on average
    assert torch.allclose(inspection.layers[0].profile()["log_keys"][4], torch.tensor(5.0).double().log().expand(4))
    assert model.config._attn_implementation == name


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma2", "gemma3", "qwen3", "bert", "t5", "whisper", "vit"])
def test_other_models(name):
    model = build(name)
    inspection = regard.inspect(model, inputs_of(name, "right" if name not in ("vit", "whisper") else None))
    assert len(inspection.layers) == (6 if name in ("t5", "whisper") else 2)
    assert [layer.index for layer in inspection.layers] == list(range(len(inspection.layers)))
    assert all(layer.rows.sum() > 0 for layer in inspection.layers)
    assert not inspection.to_pandas().isna().any().any()


def test_the_padding_of_encoder_and_decoder_is_distinguished():
    model, given = build("t5"), inputs_of("t5", "right")
    given["decoder_attention_mask"] = padded("left", 2, 9)
    given["decoder_attention_mask"][1, :] = 1
    given["decoder_attention_mask"][0, 7:] = 0
    rows = [int(layer.rows[:, 0].sum()) for layer in regard.inspect(model, given).layers]
    assert rows == [33, 33, 16, 16, 16, 16]


@pytest.mark.parametrize("kind", ["wav2vec2", "adapter", "hubert"])
def test_padding_of_sound_is_not_counted(kind):
    """The mask has samples, the attention has fewer features. A padded batch equals its sequences."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    torch.manual_seed(0)
    if kind == "hubert":
        model = hf.HubertModel(hf.HubertConfig(**sizes))
    else:
        more = {"add_adapter": True, "num_adapter_layers": 1, "output_hidden_size": 16} if kind == "adapter" else {}
        model = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**sizes, **more, vocab_size=8))
    sounds = [torch.randn(1, n, generator=torch.Generator().manual_seed(n)) for n in (400, 230)]
    alone = regard.inspect(model, [{"input_values": sound} for sound in sounds], statistics=ROW_STATISTICS)
    mask = (torch.arange(400) < torch.tensor([[400], [230]])).long()
    padded = {
        "input_values": torch.cat([sounds[0], torch.nn.functional.pad(sounds[1], (0, 170))]),
        "attention_mask": mask,
    }
    together = regard.inspect(model, padded, statistics=ROW_STATISTICS)
    assert together.rows == 39 + 22
    assert_same(together, alone)


def test_padding_of_sound_with_unknown_positions_warns():
    encoder, sound = build("whisper").model.encoder, inputs_of("whisper")["input_features"]
    mask = torch.ones(sound.shape[0], sound.shape[2], dtype=torch.long)
    with warnings.catch_warnings(), regard.watch(encoder):
        warnings.simplefilter("error")
        encoder(sound, attention_mask=mask)
    mask[0, 5:] = 0
    words = r"attention_mask: expected one of the \d+ positions that WhisperEncoder attends to"
    with pytest.warns(UserWarning, match=words) as said, regard.watch(encoder) as seen:
        encoder(sound, attention_mask=mask)
    assert len(said) == 1 and len(seen.layers) > 1


def test_a_hybrid_model():
    """Layers without attention are not recorded, and the others keep their numbers."""
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    config = hf.Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=kinds,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        experts_implementation="eager",
    )
    inspection = regard.inspect(hf.Qwen3NextForCausalLM(config), tokens(64, 1, 12))
    assert [layer.index for layer in inspection.layers] == [1, 3]


def test_a_model_that_bypasses_the_interface_raises():
    bloom = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(ValueError, match="BloomForCausalLM"):
        regard.inspect(bloom, tokens(64, 1, 4))


# --- the model afterwards ---------------------------------------------------------------------------------------------


def state_of(model):
    """What an inspection changes and must restore."""
    configurations = {id(m.config): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    functions = sorted(hf.modeling_utils.ALL_ATTENTION_FUNCTIONS), sorted(hf.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)
    return configurations, hooks, [m.training for m in model.modules()], functions, sorted(model.__dict__)


def test_the_model_is_restored():
    model = build("t5").train()
    model.decoder.block[0].eval()
    before = state_of(model)
    regard.inspect(model, inputs_of("t5"))
    assert state_of(model) == before
    with regard.watch(model):
        watched = state_of(model)
        assert watched != before
        with regard.watch(model):
            assert state_of(model) != watched
        assert state_of(model) == watched
    assert state_of(model) == before
    with pytest.raises(KeyboardInterrupt), regard.watch(model):
        raise KeyboardInterrupt
    with pytest.raises(TypeError, match="no_such"):
        regard.inspect(model, inputs_of("t5") | {"no_such": 1})
    assert state_of(model) == before


def test_watch_a_custom_loop():
    model = build("mistral")
    batches = [tokens(64, 2, 20, seed) for seed in range(3)]
    with regard.watch(model, statistics=["entropy", "max_scores"]) as record:
        for batch in batches:
            model(batch)
    expected = regard.inspect(model, batches, statistics=["entropy", "max_scores"])
    assert torch.equal(record.mean("entropy"), expected.mean("entropy")) and record.rows == expected.rows == 120
    assert list(record.to_pandas())[:4] == ["layer", "head", "entropy", "max_scores"]
    model(batches[0])
    assert record.rows == 120


def test_watch_generate():
    model = build("llama")
    with regard.watch(model, statistics=["entropy", "support"]) as record:
        model.generate(tokens(64, 1, 6), max_new_tokens=5, do_sample=False)
    assert record.rows == 6 + 4  # the last token is not read
    assert torch.allclose(record.layers[0].profile()["support"][:10, 0], torch.arange(1.0, 11).double())


def test_watch_a_training_step():
    """The gradients are the same, and activation checkpointing counts no pass twice."""
    model, batch = build("llama").double().train(), tokens(64, 2, 20)
    found, rows = [], []
    for checkpointing in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if checkpointing:
            model.gradient_checkpointing_enable(checkpointing)
        for watched in (False, True):
            model.zero_grad()
            if watched:
                with regard.watch(model) as record:
                    model(batch, labels=batch, use_cache=False).loss.backward()
                rows.append(record.rows)
            else:
                model(batch, labels=batch, use_cache=False).loss.backward()
            found.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert rows == [40, 40, 40]
    assert all(torch.allclose(g, found[0]) for g in found)


def test_watch_a_compiled_model():
    model, batch = build("llama"), tokens(64, 1, 12)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), regard.watch(model, statistics=["entropy"]) as record:
        compiled(batch)
        compiled(batch)
    assert record.rows == 24
    assert torch.allclose(record.mean("entropy"), regard.inspect(model, batch).mean("entropy"), atol=1e-5)
    torch._dynamo.reset()


def test_positions_of_packed_sequences_start_at_each_sequence():
    model, batch = build("llama"), tokens(64, 1, 20)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    packed = regard.inspect(model, {"input_ids": batch, "position_ids": positions})
    alone = regard.inspect(model, [batch[:, :8], batch[:, 8:]])
    for name in packed.columns:
        assert torch.allclose(packed.mean(name), alone.mean(name), atol=1e-4), name
    assert torch.allclose(packed.layers[0].rows, alone.layers[0].rows)


# --- padding, caches, parts -------------------------------------------------------------------------------------------


def assert_same(a, b, tolerance=1e-4):
    """Everything that is recorded, bin by bin."""
    assert [layer.name for layer in a.layers] == [layer.name for layer in b.layers]
    for x, y in zip(a.layers, b.layers, strict=True):
        assert torch.equal(x.rows, y.rows) and torch.equal(x.counts, y.counts), x.name
        assert torch.allclose(x.sums, y.sums, rtol=tolerance, atol=tolerance), x.name
        assert torch.allclose(x.maxima, y.maxima, rtol=tolerance, atol=tolerance), x.name
        n = min(len(x.key_sums), len(y.key_sums))  # a static cache has positions that no query sees
        assert not x.key_viewers[n:].any() and not y.key_viewers[n:].any()
        assert torch.equal(x.key_viewers[:n], y.key_viewers[:n]), x.name
        assert torch.allclose(x.key_sums[:n], y.key_sums[:n], rtol=tolerance, atol=tolerance), x.name


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3"])
def test_padding_changes_nothing_with_any_cache(name, cache):
    """Windows of 7 keys, 16 tokens, 4 of padding: the first key counts for the queries that still see it."""
    model, ids = build(name), tokens(64, 1, 9)
    padding = torch.zeros(1, 4, dtype=torch.long)
    found = []
    for pad, options in ((padding[:, :0], {}), (padding, {"cache_implementation": cache}), (padding, {})):
        given = {"input_ids": torch.cat([pad, ids], 1), "attention_mask": torch.cat([pad, torch.ones_like(ids)], 1)}
        with regard.watch(model, statistics=ROW_STATISTICS) as seen:
            model.generate(**given, max_new_tokens=8, do_sample=False, **(options if cache == "static" else {}))
        found.append(seen)
    assert found[0].rows == 16
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_a_window_hides_the_first_key_of_a_padded_sequence():
    model, ids = build("mistral"), tokens(64, 1, 20)
    alone = regard.inspect(model, ids, statistics=ROW_STATISTICS, patterns=True)
    for left in (3, 9):
        padding = torch.zeros(1, left, dtype=torch.long)
        given = {"input_ids": torch.cat([padding, ids], 1), "attention_mask": torch.cat([padding, ids * 0 + 1], 1)}
        given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        assert_same(regard.inspect(model, given, statistics=ROW_STATISTICS, patterns=True), alone)


def test_parts_of_a_model_called_directly():
    model, ids = build("llama"), tokens(64, 2, 20)
    given = {"input_ids": ids, "attention_mask": padded("left")}
    expected = regard.inspect(model, given, patterns=True)
    with torch.no_grad(), regard.watch(model, patterns=True) as seen:
        model.model(**given)
    assert_same(seen, expected)
    with torch.no_grad(), regard.watch(model) as seen:  # the tokens as embeddings, the mask as a positional argument
        model.model(None, given["attention_mask"], inputs_embeds=model.get_input_embeddings()(ids))
    assert_same(seen, regard.inspect(model, given))

    model, given = build("t5"), inputs_of("t5", "right")
    expected = regard.inspect(model, given, statistics=ROW_STATISTICS)
    given.pop("decoder_input_ids")
    with torch.no_grad(), regard.watch(model, statistics=ROW_STATISTICS) as seen:
        model.encoder(**given)
    encoder = Inspection(expected.statistics, layers=expected.layers[:2])
    assert_same(seen, encoder)
    with regard.watch(
        model, statistics=ROW_STATISTICS
    ) as seen:  # calls the encoder directly, and the decoder step by step
        model.generate(**given, max_new_tokens=4, do_sample=False)
    assert_same(Inspection(seen.statistics, layers=seen.layers[:2]), encoder)
    assert [int(layer.rows[:, 0].sum()) for layer in seen.layers[2:]] == [8] * 4


def test_a_decoder_whose_tokens_are_made_from_labels():
    model, given = build("t5"), inputs_of("t5", "left")
    labels, real = given.pop("decoder_input_ids").contiguous(), padded("right", 2, 9)
    real[0, 7:] = 0
    inside = regard.inspect(model, given | {"labels": labels, "decoder_attention_mask": real}, patterns=True)
    shifted = model.prepare_decoder_input_ids_from_labels(labels=labels)
    outside = regard.inspect(
        model, given | {"decoder_input_ids": shifted, "decoder_attention_mask": real}, patterns=True
    )
    assert_same(inside, outside)
    assert [int(layer.rows[:, 0].sum()) for layer in inside.layers] == [34, 34, 16, 16, 16, 16]


def test_a_decoder_reads_its_encoder_from_the_first_real_token():
    """The decoder is longer than the encoder: every query sees the first key, which is not key 0 with padding."""
    model, ids, decoded = build("t5"), tokens(64, 1, 6), tokens(64, 1, 15, 1)
    alone = regard.inspect(
        model, {"input_ids": ids, "decoder_input_ids": decoded}, statistics=ROW_STATISTICS, patterns=True
    )
    for layer in alone.layers[2:]:
        counts = layer.counts[:, layer.channels.index("first_key_mass")].sum(0)
        assert counts.tolist() == [15] * 4
        crossing = layer.name.endswith("EncDecAttention")
        assert bool(layer.counts[:, layer.channels.index("self_token")].any()) != crossing
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = eager(input_ids=ids, decoder_input_ids=decoded, output_attentions=True).cross_attentions
    for layer, p in zip((alone.layers[3], alone.layers[5]), weights, strict=True):
        assert torch.allclose(layer.means()["first_key_mass"], p[0, :, :, 0].double().mean(-1), atol=1e-5)
    # T5 uses relative distances: padding on the left changes nothing
    pad = torch.zeros(1, 5, dtype=torch.long)
    given = {"input_ids": torch.cat([pad, ids], 1), "attention_mask": torch.cat([pad, ids * 0 + 1], 1)}
    found = regard.inspect(model, given | {"decoder_input_ids": decoded}, statistics=ROW_STATISTICS, patterns=True)
    assert_same(found, alone)


# --- inputs, results, run files ---------------------------------------------------------------------------------------


def test_inputs_in_every_form():
    model, batch = build("llama"), tokens(64, 3, 10)
    expected = regard.inspect(model, batch).to_pandas()
    for inputs in (
        {"input_ids": batch},
        [batch[0], batch[1:]],
        (row for row in batch),
        [row.tolist() for row in batch],
        hf.BatchEncoding({"input_ids": batch, "attention_mask": torch.ones_like(batch)}),
    ):
        assert (regard.inspect(model, inputs).to_pandas() - expected).abs().max().max() < 1e-4
    for bad in (3.5, [[0.5]], torch.zeros(1, 4), "text"):
        with pytest.raises(TypeError, match="inputs"):
            regard.inspect(model, bad)
    with pytest.raises(ValueError, match="statistics"):
        regard.inspect(model, batch, statistics=["entropie"])
    with pytest.raises(ValueError, match="batch_size"):
        regard.inspect(model, batch, batch_size=0)


def test_results():
    inspection = regard.inspect(build("llama"), tokens(64, 2, 20))
    frame = inspection.to_pandas()
    assert list(frame.columns[:3]) == ["layer", "head", "lse"] and len(frame) == 8
    assert frame["entropy"].tolist() == inspection.mean("entropy").flatten().tolist()
    page = json.loads(inspection.to_json())
    assert [(head["layer"], head["head"]) for head in page["heads"]] == [(n // 4, n % 4) for n in range(8)]
    means = [head["mean"]["entropy"] for head in page["heads"]]
    assert torch.allclose(torch.tensor(means).double(), inspection.mean("entropy").flatten(), rtol=1e-4)
    assert all(head["rows"] == 40 for head in page["heads"])
    positions = page["positions"]
    assert len(positions["edges"]) == len(positions["rows"]) + 1 == len(positions["values"]["entropy"][7]) + 1
    assert positions["rows"][:16] == [2] * 16 and sum(positions["rows"]) == 40
    assert positions["null_entropy"][7][:3] == pytest.approx([0, math.log(2), math.log(3)], rel=1e-4)
    assert page["provenance"]["tokens"] == 40 and page["provenance"]["longest"] == 20
    assert "<title>" in inspection.to_html() and inspection.findings()
    assert "2 attention layers, 40 queries each" in inspection.summary()
    with pytest.raises(ValueError, match="name"):
        inspection.mean("kurtosis")


def numbers(inspection):
    """Everything that is recorded except the date and the duration."""
    record = json.loads(inspection.to_json())
    return record | {"provenance": {k: v for k, v in record["provenance"].items() if k not in ("date", "seconds")}}


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


def test_an_unknown_attention_raises():
    model = build("llama")
    ALL_ATTENTION_FUNCTIONS.register("elsewhere", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation_internal = "elsewhere"
    with pytest.raises(ValueError, match="elsewhere"):
        regard.inspect(model, tokens(64, 1, 8))


def test_an_interrupted_run_resumes_to_the_same_numbers(tmp_path):
    model = build("gemma3")
    batches = [tokens(64, 2, 15 + n, n) for n in range(5)]
    expected = regard.inspect(model, batches)
    run = tmp_path / "run.safetensors"

    calls = 0

    def interrupted(*_):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_hook(interrupted)  # in the middle of the third pass
    with pytest.raises(KeyboardInterrupt):
        regard.inspect(model, batches, run=run)
    hook.remove()
    assert Inspection.load(run).batches == 2
    resumed = regard.inspect(model, batches, run=run)
    assert numbers(resumed) == numbers(expected) == numbers(Inspection.load(run))
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        pickle.loads(run.read_bytes())

    for changed, message in (
        ({"inputs": [batches[1], *batches[1:]]}, "inputs"),
        ({"inputs": batches[:2]}, "batches"),
        ({"statistics": ["entropy"]}, "statistics"),
        ({"model": build("gemma3").double().bfloat16().float()}, "weights"),
    ):
        with pytest.raises(ValueError, match=message):
            regard.inspect(**{"model": model, "inputs": batches, "run": run} | changed)
    run.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="path"):
        Inspection.load(run)


TESTS = os.pathsep.join(map(str, Path(__file__).resolve().parents[:2]))
KILLED = """
import os, signal, sys, torch
sys.path[:0] = sys.argv[2].split(os.pathsep)
import regard
from regard.inspection import run
from support.models import build
from test_inspection import tokens

run.SAVE_EVERY = 0.0  # after every batch
model, batches = build("gemma3"), [tokens(64, 2, 15 + n, n) for n in range(5)]
how, count = sys.argv[3], 0
plain = os.fsync

def fsync(file):
    global count
    plain(file)
    count += 1
    if count == 3 and how == "writing":  # half a file
        part = sys.argv[1] + ".part"
        os.truncate(part, os.path.getsize(part) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

def wait(*_):
    if count == 3:
        print("in the fourth batch", flush=True)
        signal.pause()

os.fsync = fsync
model.model.layers[1].register_forward_hook(wait)
regard.inspect(model, batches, run=sys.argv[1])
"""


@pytest.mark.parametrize(("how", "batches"), [("reading", 3), ("writing", 2)])
def test_a_run_that_is_killed_resumes(tmp_path, how, batches):
    """SIGKILL: no cleanup runs. The last file is complete, and the run continues to the same numbers."""
    run = tmp_path / "run.safetensors"
    command = [sys.executable, "-c", KILLED, str(run), TESTS, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if how == "reading":
            assert process.stdout is not None and process.stdout.readline() == "in the fourth batch\n"
            process.kill()
    assert process.returncode == -signal.SIGKILL
    assert Inspection.load(run).batches == batches
    model, inputs = build("gemma3"), [tokens(64, 2, 15 + n, n) for n in range(5)]
    assert numbers(regard.inspect(model, inputs, run=run)) == numbers(regard.inspect(model, inputs))


def test_progress_goes_to_the_error_stream(capsys):
    regard.inspect(build("llama"), tokens(64, 4, 8), batch_size=1, progress=True)
    captured = capsys.readouterr()
    assert "inspecting" in captured.err and captured.out == ""
