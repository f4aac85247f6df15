"""The experiments: what must hold in the quick profile of each."""

import math

import pytest
import torch

import regard
from regard.lab import rules
from regard.lab.configuration import configured
from regard.lab.experiment import LabError, Outcomes
from regard.lab.experiments import (
    NAMES,
    forgetting,
    load,
    matching,
    normalizer,
    priors,
    recall,
    sampling,
    scaling,
    sinks,
    temperature,
    variance,
)
from regard.lab.judging import VERDICTS
from regard.lab.runner import Run
from regard.lab.training import Training, optimizer_for
from regard.nn import Context, Transformer
from regard.operator import attention
from support.experiments import TEXT, made_up, quick


def check_masking(found: Outcomes) -> None:
    for outcome in found.each("minus infinity"):
        assert outcome.result["leak"] == 0
        assert outcome.result["honest"] == pytest.approx(outcome.result["apparent"], abs=1e-5)
    for setting in ("mask to zero", "no mask"):
        assert min(found.values(setting, "leak")) > 1e-3
        assert all(o.result["honest"] != pytest.approx(o.result["apparent"], abs=1e-4) for o in found.each(setting))


def check_normalizer(found: Outcomes) -> None:
    for rule in found.settings:
        first = found.each(rule)[0].metrics[0]["val"]
        assert first == pytest.approx(math.log(len(TEXT.characters)), abs=0.6)
        if rule != "row sum":
            assert max(found.values(rule, "val")) < first - 0.5  # the model learns
    worse = found.values("row sum", "val")[0] - found.values("softmax", "val")[0]
    assert worse > 0.05  # poles where a row of scores sums to 0
    assert set(normalizer.RULES) == set(found.settings)


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


def check_temperature(found: Outcomes) -> None:
    for fixed, learned in zip(found.each("fixed"), found.each("learned"), strict=True):
        assert fixed.metrics[0]["val"] == pytest.approx(learned.metrics[0]["val"], abs=1e-6)  # the same start: τ = 1
        taus = learned.result["temperatures"]
        assert all(tau > 0 for layer in taus for tau in layer)
        assert max(abs(tau - 1) for layer in taus for tau in layer) > 1e-3
        assert {tau for layer in fixed.result["temperatures"] for tau in layer} == {1.0}


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


def check_baseline(found: Outcomes) -> None:
    ours, theirs = (found.each(s)[0] for s in ("regard", "stock SDPA"))
    for a, b in zip(ours.metrics, theirs.metrics, strict=True):
        assert a["val"] == pytest.approx(b["val"], abs=2e-3)  # the same model, the same batches
    assert not ours.result["shakespeare"]
    ratios = found.each("time")[0].result["ratios"]
    assert list(ratios) == ["32", "64"] and all(r > 0 for rs in ratios.values() for r in rs)


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
