"""`regard.inspect`: the statistics of eager matrices without the matrices, for every kind of model."""

import copy
import itertools
import json
import math
import warnings

import pytest
import torch
import transformers as hf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import regard
from regard import AuxRequest, Transport, Tsallis
from regard.inspection.layers import bin_starts, position_bins
from regard.lowering import lower
from regard.statistics import ROW_STATISTICS
from support.checkpoints import smollm2, stories260k
from support.models import build, inputs_of, padded
from support.recorded import assert_means, assert_same, tokens

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


# --- inputs and results -----------------------------------------------------------------------------------------------


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


def test_an_unknown_attention_raises():
    model = build("llama")
    ALL_ATTENTION_FUNCTIONS.register("elsewhere", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation_internal = "elsewhere"
    with pytest.raises(ValueError, match="elsewhere"):
        regard.inspect(model, tokens(64, 1, 8))
