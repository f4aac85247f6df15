"""Checkpoints of models with problems that see the model: parameters are saved, required and never lost silently."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, LlamaModel

import regard
from regard import Transport
from regard.hf import registry
from support.factories import FACTORIES, Fox, GatesOfOne, ScalableSoftmax
from support.models import build

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
NAME = "regard-saved-factory"


def trained(factory, kind="llama"):
    """A model whose factory has other values than those it was registered with."""
    torch.manual_seed(7)
    model = build(kind)
    regard.hf.register(NAME, factory)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        for parameter in regard.hf.problem_parameters(model):
            parameter.add_(torch.rand_like(parameter))
    return model


def output(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture
def folder(tmp_path):
    model = trained(Fox())
    model.save_pretrained(tmp_path)
    return tmp_path, output(model)


@pytest.fixture
def forgotten(folder):
    """The same in a process that has not registered the factory."""
    del registry._problems[NAME]
    registry.remove(NAME)
    return folder


def loaders(kind):
    return (
        lambda path: kind.from_pretrained(path, attn_implementation=NAME),
        lambda path: AutoModelForCausalLM.from_pretrained(path, attn_implementation=NAME),
        regard.hf.from_pretrained,
        lambda path: regard.hf.load(str(path))[0],
    )


@pytest.mark.parametrize("kind", [LlamaForCausalLM, GPT2LMHeadModel])
@pytest.mark.parametrize("factory", FACTORIES)
def test_loading_restores_the_parameters_exactly(factory, kind, tmp_path):
    model = trained(FACTORIES[factory](), "llama" if kind is LlamaForCausalLM else "gpt2")
    model.save_pretrained(tmp_path)
    expected = output(model)
    for load in loaders(kind):
        other = load(tmp_path)
        assert torch.equal(output(other), expected)
        assert {n for n, _ in other.named_parameters()} == {n for n, _ in model.named_parameters()}
        same = other.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(same, model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0))


def test_the_configuration_names_the_factory(folder):
    entry = json.loads((folder[0] / "config.json").read_text())["regard_problem"]
    assert entry == {"name": NAME, "text": "the factory Fox(...)", "problem": None, "factory": "Fox(...)"}


def test_a_factory_that_is_not_registered_raises_with_the_remedy(forgotten):
    path, expected = forgotten
    message = rf"the factory Fox\(\.\.\.\), .* got no such name; call regard.hf.register\('{NAME}', Fox\(\.\.\.\)\)"
    for load in (LlamaForCausalLM.from_pretrained, regard.hf.from_pretrained, lambda path: regard.hf.load(str(path))):
        with pytest.raises(ValueError, match=message):
            load(path)
    regard.hf.register(NAME, Fox())
    assert torch.equal(output(regard.hf.from_pretrained(path)), expected)


@pytest.mark.parametrize("other", [ScalableSoftmax, lambda: GatesOfOne, Transport, lambda: None])
def test_another_factory_of_the_name_raises(folder, other):
    path, _ = folder
    regard.hf.register(NAME, other())
    for load in loaders(LlamaForCausalLM):
        with pytest.raises(ValueError, match=rf"expected '{NAME}', registered with the factory Fox"):
            load(path)


def test_another_attention_raises(folder):
    path, _ = folder
    for kwargs in ({}, {"attn_implementation": "sdpa"}):
        with pytest.raises(ValueError, match=f"expected '{NAME}', because the checkpoint.*remove regard_problem"):
            LlamaForCausalLM.from_pretrained(path, **kwargs)


def test_a_problem_is_not_a_factory(tmp_path):
    model = build("llama")
    model.set_attn_implementation(regard.hf.register(NAME, Transport(temperature=2.0)))
    model.save_pretrained(tmp_path)
    regard.hf.register(NAME, Fox())
    with pytest.raises(ValueError, match=r"with Transport\(KL\(\), temperature=2.0\), .* got Factory\(Fox\(...\)\)"):
        regard.hf.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factory", [Fox, lambda: GatesOfOne])
def test_a_stock_checkpoint_gets_the_values_as_registered(factory, dtype, tmp_path):
    """Transformers gives parameters that a checkpoint does not have values of its own; these keep theirs."""
    build("llama").save_pretrained(tmp_path)
    made = factory()
    regard.hf.register(NAME, made)
    model = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME, dtype=dtype)
    parameters = regard.hf.problem_parameters(model)
    assert all(p.dtype == dtype and p.device.type == "cpu" and p.requires_grad for p in parameters)
    if isinstance(made, Fox):
        assert model.model.regard_problem is made and float(made.scale) == 0.5  # a buffer that no checkpoint has
        as_registered = registry._problems[NAME].as_registered
        for one, other in zip(parameters, as_registered.parameters(), strict=True):
            assert torch.equal(one, other.to(dtype))
    else:
        assert model.model.layers[1].self_attn.regard_problem.gate.bias.tolist() == [3.0] * 4
    assert output(model).isfinite().all()


def test_a_frozen_parameter_stays_frozen(tmp_path):
    build("llama").save_pretrained(tmp_path)
    fox = Fox()
    fox.gates[0].weight.requires_grad_(False)
    regard.hf.register(NAME, fox)
    for _ in range(2):  # from a stock checkpoint, and from one with the parameter
        model = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert frozen == {"model.regard_problem.gates.0.weight"}
        model.save_pretrained(tmp_path)


def test_a_base_model_has_the_parameters_of_the_whole(folder, tmp_path):
    """Also the other way round: the module is a part of the base model."""
    path, _ = folder
    base = LlamaModel.from_pretrained(path, attn_implementation=NAME).eval()
    whole = regard.hf.from_pretrained(path).eval()
    with torch.no_grad():
        assert torch.equal(base(IDS).last_hidden_state, whole.model(IDS).last_hidden_state)
    whole.model.save_pretrained(tmp_path / "base")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "base", attn_implementation=NAME).eval()
    with torch.no_grad():
        assert torch.equal(again.model(IDS).last_hidden_state, base(IDS).last_hidden_state)


def test_a_part_without_the_module_is_not_saved(tmp_path):
    model = build("t5")
    model.set_attn_implementation(regard.hf.register(NAME, ScalableSoftmax()))
    with pytest.raises(
        ValueError, match="save_pretrained: expected the model whose part 'regard_problem' is ScalableSof"
    ):
        model.encoder.save_pretrained(tmp_path)


def test_retrofit_and_a_factory_are_saved_together(tmp_path):
    model = regard.hf.retrofit(trained(ScalableSoftmax()))
    with pytest.raises(ValueError, match='expected a problem with a temperature for "temperature"'):
        model(IDS)
    model = trained(Fox())
    before = output(model)
    regard.hf.retrofit(model)
    assert torch.allclose(output(model), before, atol=1e-5)
    with torch.no_grad():
        for parameter in regard.hf.retrofitted_parameters(model):
            parameter.fill_(0.3)
    model.save_pretrained(tmp_path)
    expected = output(model)
    assert not torch.allclose(expected, before, atol=1e-2)
    for load in (regard.hf.from_pretrained, lambda path: regard.hf.load(str(path))[0]):
        assert torch.equal(output(load(tmp_path)), expected)
    regard.hf.unretrofit(model)
    assert torch.allclose(output(model), before, atol=1e-5)
