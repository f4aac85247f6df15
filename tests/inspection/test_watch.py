"""`regard.watch` records loops of one's own; models are restored; padding, caches and parts of models."""

import copy

import pytest
import torch
import transformers as hf

import regard
from regard import Inspection
from regard.statistics import ROW_STATISTICS
from support.models import build, inputs_of, padded
from support.recorded import assert_same, tokens

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
