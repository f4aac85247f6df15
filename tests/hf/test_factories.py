"""Problems that see the model inside of transformers models: what they are told, decoding, parameters."""

import copy
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, QuantizedCache, StaticCache

import regard
from regard import Bias, Causal, Decay, Free, Transport
from regard.nn import Context
from support.factories import FACTORIES, HEADS, LAYERS, ByLength, Fox, GatesOfOne, ScalableSoftmax
from support.models import DECODERS, LAYOUTS, MODELS, build, inputs_of, logits, padded

IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(0))


def model_with(factory, kind="llama", **changes):
    torch.manual_seed(7)
    model = build(kind, **changes)
    model.set_attn_implementation(regard.hf.register("regard-factory", factory))
    return model


def cache_of(model, kind):
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=24)
    return QuantizedCache("fp8", model.config) if kind == "fp8" else DynamicCache(config=model.config)


@torch.no_grad()
def in_pieces(model, ids, cache, pieces):
    """The logits of a text that is read in pieces of these lengths."""
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(pieces, 1)], 1)


@torch.no_grad()
def generated(model, ids=IDS, **options):
    return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, **options)[:, ids.shape[1] :]


# --- what a factory computes ------------------------------------------------------------------------------------------


def test_gates_equal_a_mask_of_their_sums():
    """Stock attention with the sums of the gates written into a dense mask, for a model of one layer."""
    fox = Fox(layers=1)
    model = model_with(fox, num_hidden_layers=1)
    states = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: states.append(kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        found = model(IDS).logits
        sums = (0.5 * F.logsigmoid(fox.gates[0](states[0]))).mT.cumsum(-1)  # [B, H, T]
        mask = (sums[..., :, None] - sums[..., None, :]).masked_fill(~torch.ones(20, 20).tril().bool(), -torch.inf)
        model.set_attn_implementation("eager")
        expected = model(IDS, attention_mask=mask).logits
    assert torch.allclose(found, expected, atol=1e-5) and not torch.allclose(found, model(IDS).logits, atol=1e-2)


def test_length_and_number_of_keys_agree():
    """In a causal model without a window the number of keys is the position plus 1."""
    one, other = ByLength(), ScalableSoftmax()
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.allclose(model_with(one)(IDS).logits, model_with(other)(IDS).logits, atol=1e-5)


@pytest.mark.parametrize("name", [*MODELS, *LAYOUTS])
def test_the_hidden_states_of_every_kind_of_model(name):
    """What a factory sees gives the queries; a factory that returns None is softmax."""
    seen = []

    def look(context):
        assert context.module in attentions and context.heads == 4 and isinstance(context, Context)
        assert context.hidden_states.dim() == 3
        assert context.query_positions.shape == context.hidden_states.shape[:2]
        seen.append(context)

    torch.manual_seed(0)
    model = build(name) if name in MODELS else LAYOUTS[name][0](LAYOUTS[name][1]()).eval()
    attentions = list(regard.hf.attentions(model).values())
    given = inputs_of(name, "left" if name in DECODERS else None)
    expected = logits(model, regard.hf.register(), given)
    assert torch.equal(logits(model, regard.hf.register("regard-look", look), given), expected)
    kinds = {**MODELS, **LAYOUTS}
    assert len(seen) == kinds[name][2]
    assert sorted({context.layer for context in seen}) == list(range(len(attentions)))
    for context in seen:
        where = name_of(context, model)
        cross = getattr(context.module, "is_cross_attention", False)
        assert context.is_cross == (cross or "encoder_attn" in where or "EncDec" in where)


def name_of(context, model):
    return next(name for name, module in model.named_modules() if module is context.module)


def contexts(model, **given):
    """The contexts of the first layer in the calls that a block makes."""
    found = []

    def look(context):
        if context.layer == 0:
            found.append((context.query_positions, context.key_positions, context.lengths))

    model.set_attn_implementation(regard.hf.register("regard-look", look))
    with torch.no_grad():
        model(**given)
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "bert"])
def test_positions_do_not_count_padding(name, side):
    mask = padded(side)
    (queries, keys, lengths), *_ = contexts(build(name), **inputs_of(name, side))
    assert queries.tolist() == (mask.cumsum(1) - 1).clamp(min=0).tolist() and torch.equal(queries, keys)
    assert lengths.tolist() == [20, 14 if side == "left" else 13]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_positions_in_generation(name, static):
    found = []

    def look(context):
        if context.layer == 0:
            found.append((context.query_positions, context.key_positions, context.lengths))

    model = model_with(look, name)
    generated(model, attention_mask=padded("left"), **({"cache_implementation": "static"} if static else {}))
    for step, (queries, keys, lengths) in enumerate(found[1:]):
        assert queries.tolist() == [[20 + step], [14 + step]] and lengths.tolist() == [21 + step, 15 + step]
        assert keys[:, -1].tolist() == [20 + step, 14 + step] and keys.shape[0] == 2


def test_positions_of_packed_sequences():
    positions = torch.tensor([[*range(7), *range(13)]])
    found = []

    def look(context):
        found.append((context.query_positions, context.key_positions))
        with pytest.raises(ValueError, match=r"lengths: expected one sequence in each row, got packed ones; query_po"):
            _ = context.lengths

    with torch.no_grad():
        model_with(look)(IDS[:1], position_ids=positions)
    for queries, keys in found:
        assert torch.equal(queries, positions) and torch.equal(keys, positions)


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("name", [*DECODERS, "gpt_neox"])
def test_decoding_equals_prefill(name, factory, kind):
    """Also behind a sliding window, whose keys a cache drops (mistral, gemma2, gemma3, gpt-oss)."""
    made = FACTORIES[factory]()
    if name == "gpt_neox":
        torch.manual_seed(0)
        model = LAYOUTS[name][0](LAYOUTS[name][1]()).eval()
        model.set_attn_implementation(regard.hf.register("regard-factory", made))
    else:
        model = model_with(made, name)
    with torch.no_grad():
        expected = model(IDS).logits
    for pieces in ([9, *[1] * 11], [3, 1, 6, 1, 1, 8]):  # a prompt and tokens; pieces as of chunked prefill
        found = in_pieces(model, IDS, cache_of(model, kind), pieces)
        assert torch.allclose(found, expected, atol=1e-4), (found - expected).abs().max()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_generation(name, factory, kind, beams):
    model = model_with(FACTORIES[factory](), name)
    expected = generated(model, use_cache=False, num_beams=beams)
    assert torch.equal(generated(model, cache_implementation=kind, num_beams=beams), expected)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_left_padding(factory, kind, beams):
    model = model_with(FACTORIES[factory]())
    both = generated(model, attention_mask=padded("left"), cache_implementation=kind, num_beams=beams)
    for row, start in ((0, 0), (1, 6)):
        assert torch.equal(both[row], generated(model, IDS[row : row + 1, start:], num_beams=beams)[0])


@pytest.mark.parametrize("factory", FACTORIES)
def test_packed_sequences(factory):
    model = model_with(FACTORIES[factory]())
    positions = torch.tensor([[*range(7), *range(13)]])
    with torch.no_grad():
        found = model(IDS[:1], position_ids=positions, use_cache=False).logits  # with a cache, it is one sequence
        alone = torch.cat([model(IDS[:1, :7]).logits, model(IDS[:1, 7:]).logits], 1)
    assert torch.allclose(found, alone, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_assisted_decoding_crops_the_cache(name):
    model = model_with(Fox(), name)
    torch.manual_seed(3)
    small = build(name, **({"n_layer": 1} if name == "gpt2" else {"num_hidden_layers": 1}))
    small.set_attn_implementation(regard.hf.register("regard-small", Fox(layers=1)))
    expected = generated(model, IDS[:1], use_cache=False)
    assert torch.equal(generated(model, IDS[:1], assistant_model=small), expected)
    assert torch.equal(generated(model, IDS[:1], prompt_lookup_num_tokens=3), expected)


def test_a_quantized_cache_keeps_the_gates_exact():
    """Keys are rounded to 8 bits, gates are not: the gates of a step are those of the whole text."""
    kept = []

    def gates(context):
        states = context.hidden_states.mean(-1)[:, None].expand(-1, HEADS, -1)
        kept.append(context.remember("gates", F.logsigmoid(states)) if context.layer == 0 else None)
        return

    model = model_with(gates)
    in_pieces(model, IDS, cache_of(model, "fp8"), [9, 1, 1, 9])
    steps, kept[:] = kept[-LAYERS], []
    with torch.no_grad():
        model(IDS)
    assert torch.allclose(steps, kept[0], atol=1e-6)
    assert (
        generated(model, cache_implementation="quantized", cache_config={"backend": "fp8"}, num_beams=2).shape[0] == 2
    )


def test_a_cache_is_copied_with_its_memory():
    """A cached prompt serves several continuations."""
    model = model_with(Fox())
    cache = cache_of(model, "dynamic")
    in_pieces(model, IDS[:, :8], cache, [8])
    for other in (copy.deepcopy(cache), copy.deepcopy(cache)):
        found = in_pieces(model, IDS[:, 8:], other, [1, 11])
        with torch.no_grad():
            assert torch.allclose(found, model(IDS).logits[:, 8:], atol=1e-5)


def test_a_cache_that_is_reset_serves_again():
    for kind in ("dynamic", "static"):
        model = model_with(Fox())
        cache = cache_of(model, kind)
        first = in_pieces(model, IDS, cache, [12, 8])
        cache.reset()
        assert torch.equal(in_pieces(model, IDS, cache, [12, 8]), first)


def test_rows_of_a_cache_can_be_chosen_and_repeated():
    model = model_with(Fox())
    cache = cache_of(model, "dynamic")
    in_pieces(model, IDS, cache, [20])
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(3)
    cache.crop(-5)
    found = in_pieces(model, IDS[1:, 15:].expand(3, -1), cache, [1, 4])
    with torch.no_grad():
        assert torch.allclose(found, model(IDS[1:]).logits[:, 15:].expand(3, -1, -1), atol=1e-5)


# --- caches that cannot be followed -----------------------------------------------------------------------------------


def test_a_cache_that_was_filled_before_raises():
    model = build("llama")
    cache = cache_of(model, "dynamic")
    in_pieces(model, IDS[:, :8], cache, [8])
    model.set_attn_implementation(regard.hf.register("regard-factory", Fox()))
    with pytest.raises(ValueError, match=r"remember\('gates'\): .* it has 8 earlier keys for which nothing was rememb"):
        in_pieces(model, IDS[:, 8:], cache, [12])


def test_keys_that_others_replace_raise():
    model = model_with(Fox())
    cache = cache_of(model, "dynamic")
    in_pieces(model, IDS[:, :8], cache, [8])
    cache.layers[0].keys = cache.layers[0].keys.flip(0)  # as a reordering by other means would
    with pytest.raises(ValueError, match="its keys were replaced by other means than its methods"):
        in_pieces(model, IDS[:, 8:], cache, [12])


def test_a_step_that_remembered_nothing_raises():
    def sometimes(context):
        if context.hidden_states.shape[1] != 2:
            context.remember("gates", context.hidden_states.mT)

    model = model_with(sometimes)
    with pytest.raises(ValueError, match="it was given keys in a call that remembered nothing"):
        in_pieces(model, IDS, cache_of(model, "dynamic"), [17, 2, 1])


def test_an_unknown_cache_raises():
    class Odd(transformers.cache_utils.DynamicLayer):
        def update(self, *args, **kwargs):
            return super().update(*args, **kwargs)

    model = model_with(Fox())
    cache = transformers.Cache(layer_class_to_replicate=Odd)
    with pytest.raises(ValueError, match="regard does not know how Odd keeps its keys"):
        in_pieces(model, IDS, cache, [20])


def test_wrong_use_of_remember_raises():
    def expect(message, use):
        def factory(context):
            with pytest.raises((ValueError, TypeError), match=message):
                use(context)

        model = model_with(factory)
        in_pieces(model, IDS, cache_of(model, "dynamic"), [20])

    expect(
        r"remember\('x'\): expected a tensor \[B, ..., Tq\] with B=2 .* Tq=20",
        lambda c: c.remember("x", torch.ones(2, 4)),
    )
    expect(r"remember\('x'\): .* got a tensor|remember\('x'\): .* got", lambda c: c.remember("x", 3.0))
    expect(r"remember\(name\): expected a str, got", lambda c: c.remember(1, torch.ones(2, 20)))
    ones = torch.ones(2, 20)
    expect(r"expected one call in each forward", lambda c: (c.remember("x", ones), c.remember("x", ones)))


def test_two_memories_and_one_row_for_all():
    found = []

    def factory(context):
        T = context.hidden_states.shape[1]
        row = torch.arange(T).float()[None, None] + 1
        found.append((context.remember("a", row), context.remember("b", row.expand(2, 3, T))))

    model = model_with(factory)
    in_pieces(model, IDS[:, :5], cache_of(model, "dynamic"), [3, 2])
    assert found[-1][0].tolist() == [[[1.0, 2, 3, 1, 2]]] * 2 and found[-1][1].shape == (2, 3, 5)


def test_cross_attention_has_nothing_to_remember():
    def factory(context):
        if context.is_cross:
            with pytest.raises(ValueError, match=r"remember\('x'\): expected keys of the sequence that the hidden"):
                context.remember("x", context.hidden_states.mT)
        else:
            kept = context.remember("x", context.hidden_states.mT)
            assert kept.shape[-1] == context.key_positions.shape[1]

    model = model_with(factory, "t5")
    generated(model, num_beams=2)


# --- models -----------------------------------------------------------------------------------------------------------


def test_the_first_model_owns_the_module_and_others_have_copies():
    fox = Fox()
    before = copy.deepcopy(fox.state_dict())
    first = model_with(fox)
    assert {id(p) for p in fox.parameters()} <= {id(p) for p in first.parameters()}
    assert next(n for n, _ in first.named_parameters() if "regard" in n) == "model.regard_problem.gates.0.weight"
    assert {id(p) for p in regard.hf.problem_parameters(first)} == {id(p) for p in fox.parameters()}
    with torch.no_grad():
        fox.gates[0].weight.zero_()
    second = build("llama")
    second.set_attn_implementation("regard-factory")
    other = second.model.regard_problem
    assert other is not fox and all(torch.equal(other.state_dict()[name], value) for name, value in before.items())
    third = transformers.AutoModelForCausalLM.from_config(MODELS["llama"][1](), attn_implementation="regard-factory")
    assert third.model.regard_problem not in (fox, other)
    assert torch.equal(third.model.regard_problem.gates[0].weight, before["gates.0.weight"])


def test_a_module_that_is_registered_again_belongs_to_its_model():
    fox = Fox()
    first = model_with(fox)
    second = model_with(fox)  # registers it again
    assert first.model.regard_problem is fox and second.model.regard_problem is not fox
    first.set_attn_implementation("regard-factory")
    assert first.model.regard_problem is fox


def test_each_attention_has_an_instance_of_a_class():
    model = model_with(GatesOfOne)
    own = [layer.self_attn.regard_problem for layer in model.model.layers]
    assert own[0] is not own[1] and own[0].gate.bias.tolist() == [3.0] * 4
    assert len(regard.hf.problem_parameters(model)) == 4


def test_another_implementation_takes_the_parameters_out_and_the_name_brings_them_back():
    stock = [name for name, _ in build("llama").named_parameters()]
    for factory in (Fox(), GatesOfOne):
        model = model_with(factory)
        with torch.no_grad():
            for parameter in regard.hf.problem_parameters(model):
                parameter.normal_()
            expected = model(IDS).logits
            model.set_attn_implementation("sdpa")
            assert [name for name, _ in model.named_parameters()] == stock
            assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
            with pytest.raises(ValueError, match="expected one whose attention implementation is a module that builds"):
                regard.hf.problem_parameters(model)
            model.set_attn_implementation("regard-factory")
            assert torch.equal(model(IDS).logits, expected)


def test_a_name_that_is_registered_again():
    """A model keeps what it has adopted until the name is set again."""
    one, other = Fox(), Fox()
    model = model_with(one)
    regard.hf.register("regard-factory", other)
    model(IDS)
    assert model.model.regard_problem is one
    model.set_attn_implementation("regard-factory")
    assert model.model.regard_problem is other


def test_a_name_in_the_configuration_alone_raises():
    model = build("llama")
    model.config._attn_implementation = regard.hf.register("regard-factory", Fox())
    with pytest.raises(
        RuntimeError, match=r"model.set_attn_implementation\('regard-factory'\) was called on, got a Llama"
    ):
        model(IDS)
    model.set_attn_implementation("regard-factory")
    model(IDS)


def test_an_attention_without_keyword_arguments_raises():
    config = transformers.VideoMAEConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, image_size=16, patch_size=8
    )
    model = transformers.VideoMAEModel(config)
    with pytest.raises(ValueError, match="got VideoMAESelfAttention, which does not: Fox could not see its hidden"):
        model.set_attn_implementation(regard.hf.register("regard-factory", Fox()))


def test_an_attention_that_does_not_pass_arguments_on_raises():
    config = transformers.SiglipVisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, image_size=16, patch_size=8
    )
    model = transformers.SiglipVisionModel(config)
    model.set_attn_implementation(regard.hf.register("regard-factory", Fox()))
    with pytest.raises(ValueError, match="got SiglipAttention, which does not: Fox cannot see its hidden states"):
        model(torch.randn(1, 3, 16, 16))


def test_copies_and_pickles():
    model = model_with(Fox())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            expected = model(IDS).logits
            assert torch.equal(other(IDS).logits, expected)
            other.model.regard_problem.gates[0].weight.normal_()
            assert not torch.equal(other(IDS).logits, expected) and torch.equal(model(IDS).logits, expected)


def test_threads_do_not_mix_their_calls():
    model = model_with(ByLength())
    masks = [padded("left"), padded("right"), torch.ones(2, 20, dtype=torch.long)]
    found = {}

    def run(n):
        with torch.no_grad():
            found[n] = [model(IDS, attention_mask=masks[n]).logits for _ in range(5)]

    with torch.no_grad():
        expected = [model(IDS, attention_mask=mask).logits for mask in masks]
    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, outputs in found.items():
        assert all(torch.equal(one, expected[n]) for one in outputs) and len(outputs) == 5


# --- what is registered -----------------------------------------------------------------------------------------------


def test_what_cannot_be_a_factory_raises():
    fox, slope = Fox(), nn.Parameter(torch.ones(4, 1, 1))
    for given, error, message in (
        (fox.forward, ValueError, "got a function with the module Fox, which no model's"),
        (
            lambda context: Transport(temperature=slope),
            ValueError,
            r"got a function with .*make it the forward of a mod",
        ),
        (lambda: fox(None), ValueError, "the module Fox"),
        (lambda context, other: None, TypeError, r"one argument, the context, got one of \(context, other\)"),
        (dict, TypeError, "expected a class of modules, a module or a function, got the class dict"),
        (Transport, TypeError, "expected an instance, got the class Transport"),
        (3, TypeError, "a callable that builds a Transport, or None, got"),
    ):
        with pytest.raises(error, match=message):
            regard.hf.register("regard-factory", given)


def test_a_wrong_result_raises():
    with pytest.raises(TypeError, match="expected a callable that returns a Transport or None, got"):
        model_with(lambda context: Causal())(IDS)


def test_a_callable_without_arguments():
    with torch.no_grad():
        found = model_with(lambda: Transport(marginal=Free()))(IDS).logits
        model = build("llama")
        model.set_attn_implementation(regard.hf.register("regard-factory", Transport(marginal=Free())))
        assert torch.equal(found, model(IDS).logits)


def test_a_tensor_of_one_length_raises_with_the_remedy():
    model = model_with(lambda context: Transport(prior=Bias(torch.zeros(20, 20))))
    with torch.no_grad():
        model(IDS)
        with pytest.raises(
            ValueError, match=r"Bias\(log_prior\).* for 20 queries and 20 keys, in a call with Tq=9, T.*fits"
        ):
            model(IDS[:, :9])
    gates = -torch.ones(4, 20)
    with pytest.raises(ValueError, match=r"Decay\(log_forget\).* for 20 keys, in a call with Tq=1, Tk=21; "):
        generated(model_with(lambda context: Transport(prior=Decay(gates))))


def test_two_factories_in_one_model_raise():
    torch.manual_seed(0)
    text, vision = (
        MODELS["llama"][1](),
        transformers.CLIPVisionConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=32,
            image_size=16,
            patch_size=8,
        ),
    )
    model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(text_config=text, vision_config=vision))
    regard.hf.register("regard-factory", Fox())
    regard.hf.register("regard-other", Fox())
    with pytest.raises(
        ValueError, match=r"expected one factory for all parts of a model, got \['regard-factory', 'rega"
    ):
        model.set_attn_implementation({"text_config": "regard-factory", "vision_config": "regard-other"})
    model.set_attn_implementation({"text_config": "regard-factory", "vision_config": "sdpa"})
    with torch.no_grad():
        model(IDS)


PROGRAM = """
import torch, regard
from support.factories import Fox
from support.models import build

model = build("llama")
model.set_attn_implementation(regard.hf.register("regard-first", Fox()))
model(torch.arange(8)[None])
print([name for name, _ in model.named_parameters() if "regard" in name][0])
"""


def test_the_first_name_of_a_process():
    """Python reads the method of the model before `register` has changed transformers."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == "model.regard_problem.gates.0.weight", ran.stderr
