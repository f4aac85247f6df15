"""Inspection and monitoring of models with structured priors, unions and rules for the temperature."""

import json
import math

import pytest
import torch
import transformers as hf

import regard
from regard import (
    Blocks,
    ByKeys,
    Causal,
    Decay,
    Density,
    LowRank,
    Monitor,
    Prefix,
    Relative,
    Selected,
    Transport,
    Window,
)
from regard.nn import MultiheadAttention
from support.models import build, inputs_of
from support.training import lines, samples

hf.logging.set_verbosity_error()
T, H = 20, 4
drawn = torch.Generator().manual_seed(0)
PROBLEMS = {
    "relative": Transport(prior=Relative(torch.randn(H, 9, generator=drawn))),
    "low rank": Transport(prior=LowRank(torch.randn(H, T, 2, generator=drawn), torch.randn(H, T, 2, generator=drawn))),
    "decay": Transport(prior=Decay(-torch.rand(H, T, generator=drawn))),
    "density": Transport(prior=Density(torch.rand(T, T, generator=drawn))),
    "selected": Transport(prior=Selected((torch.arange(T) // 5)[None, None, :, None], 5)),
    "union": Transport(prior=Window(2) | Prefix(2)),
    "blocks": Transport(prior=Blocks(torch.ones(4, 4, dtype=torch.bool).tril(), 5)),
    "by keys": Transport(temperature=ByKeys(torch.full((H,), 0.7))),
    "product": Transport(
        regard.Tsallis(1.5), prior=Relative(torch.randn(H, 9, generator=drawn)) * (Window(2) | Prefix(2))
    ),
}


def direct(model, given):
    """The statistics of every layer, from the calls that the model makes."""
    found, plain = [], regard.hf.calls.attention

    def noted(*args, **kwargs):
        request = regard.AuxRequest(entropy=True, max_weight=True, support=True)
        call = {name: value for name, value in kwargs.items() if name != "return_aux"}
        found.append(plain(*args, **call, return_aux=request)[1])
        return plain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.hf.calls.attention", noted)
        with torch.no_grad():
            model(**given)
    return found


@pytest.mark.parametrize("name", PROBLEMS)
def test_an_inspection_measures_the_plan(name):
    problem = PROBLEMS[name]
    model, given = build("llama"), inputs_of("llama")
    model.set_attn_implementation(regard.hf.register("regard-inspected", problem))
    with torch.no_grad():
        before = model(**given).logits
    inspection = regard.inspect(model, given)
    expected = direct(model, given)
    for statistic in ("entropy", "max_weight", "support"):
        means = torch.stack([getattr(aux, statistic).double().mean((0, 2)) for aux in expected])
        torch.testing.assert_close(inspection.mean(statistic), means, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(model(**given).logits, before)
    assert inspection.to_html().startswith("<!") and isinstance(inspection.findings(), list)
    # the record contains the problem
    (written,) = json.loads(inspection.to_json())["provenance"]["declared"].values()
    again = Transport.from_json(written)
    assert again.to_json() == problem.to_json()
    regard.hf.register("regard-inspected", again)
    assert torch.equal(model(**given).logits, before)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_monitor_measures_a_model_of_transformers(name, tmp_path):
    model, given = build("llama"), inputs_of("llama")
    model.set_attn_implementation(regard.hf.register("regard-watched", PROBLEMS[name]))
    monitor = Monitor(model, every=1, path=tmp_path / "run.jsonl")
    with monitor(0):
        model(**given, labels=given["input_ids"]).loss.backward()
    monitor.close()
    [line] = samples(tmp_path / "run.jsonl")
    means = [aux.entropy.double().mean((0, 2)) for aux in direct(model, given)]
    for layer, mean in enumerate(means):
        assert line[f"attn/entropy/L{layer:02}_min"] == pytest.approx(float(mean.min()), rel=1e-4, abs=1e-6)
    (written,) = lines(tmp_path / "run.jsonl")[0]["declared"].values()
    assert Transport.from_json(written).to_json() == PROBLEMS[name].to_json()


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_monitor_measures_modules(name, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": MultiheadAttention(16, H, batch_first=True, problem=PROBLEMS[name])})
    model.forward = lambda x: model["a"](x, x, x, need_weights=False)[0]
    monitor = Monitor(model, every=1, path=tmp_path / "run.jsonl")
    with monitor(0):
        model(torch.randn(2, T, 16)).sum().backward()
    monitor.close()
    [line] = samples(tmp_path / "run.jsonl")
    assert 0 <= line["attn/entropy/L00_min"] <= math.log(T)
    declared = lines(tmp_path / "run.jsonl")[0]["declared"]
    assert Transport.from_json(declared["a"]).to_json() == PROBLEMS[name].to_json()


def test_parameters_are_written_by_name_and_built_problems_as_none(tmp_path):
    table = torch.nn.Parameter(torch.zeros(H, 5))
    model = torch.nn.ModuleDict(
        {
            "learned": MultiheadAttention(16, H, batch_first=True, problem=Transport(prior=Causal() * Relative(table))),
            "built": MultiheadAttention(16, H, batch_first=True, problem=lambda: Transport(temperature=0.5)),
            "softmax": MultiheadAttention(16, H, batch_first=True),
        }
    )
    model.forward = lambda x: sum(part(x, x, x, need_weights=False)[0] for part in model.values())
    monitor = Monitor(model, every=1, path=tmp_path / "run.jsonl")
    with monitor(0):
        model(torch.randn(2, T, 16)).sum().backward()
    monitor.close()
    declared = lines(tmp_path / "run.jsonl")[0]["declared"]
    assert declared.keys() == {"learned", "built"} and declared["built"] is None
    assert "learned.problem.prior.parts.1.table" in declared["learned"]
    again = Transport.from_json(declared["learned"], dict(model.named_parameters()))
    assert again.prior.parts[1].table is table
