"""Each rule on both sides of its threshold, rules that cannot be checked, and the verdict."""

import copy
import math
from importlib import resources

import pytest
import torch
import transformers

import regard
from regard import Inspection
from regard.inspection import Finding, Thresholds
from regard.inspection.findings import find, verdict
from regard.inspection.numbers import in_units
from support.inspections import inspection

PLAIN = {  # a head to which no rule applies
    "entropy": 2.0, "normalized_entropy": 0.5, "score_variance": 1.0, "max_scores": 10.0, "max_weight": 0.5,
    "first_key_mass": 0.1, "relative_norm": 1.0, "previous_token": 0.1, "self_token": 0.1, "induction": 0.1,
}  # fmt: skip


def record(*heads: dict) -> dict:
    """One layer of heads, each given by what differs from a plain one; every mean is also the largest value."""
    entries = []
    for number, changes in enumerate(heads):
        values = {**PLAIN, **changes}
        entries.append({"layer": 3, "head": number, "rows": 100, "mean": values, "max": values, "min": values})
    return {"format": "regard-inspection", "version": 1, "statistics": list(PLAIN), "heads": entries}


def test_counts_with_units():
    shown = {7: "7", 999: "999", 1000: "1K", 735_567: "736K", 999_400: "999K", 999_600: "1M", 22_565_376: "22.6M"}
    shown |= {134_515_008: "135M", 1_240_000_000: "1.24B", 671_000_000_000: "671B"}
    assert {n: in_units(n) for n in shown} == shown


def rules(found: list[Finding]) -> set[str]:
    return {f.rule for f in found if f.layer is not None}


def above(x: float) -> float:
    return math.nextafter(x, math.inf)


def below(x: float) -> float:
    return math.nextafter(x, -math.inf)


SINK = {"first_key_mass": above(0.3)}
EDGES = [  # rule, statistic, its first value beyond the threshold, the threshold, what else must hold
    ("logit-alarm", "max_scores", above(100), 100, {}),
    ("sink", "first_key_mass", above(0.3), 0.3, {}),
    ("first-token", "first_key_mass", above(0.4), 0.4, {}),
    ("dormant", "relative_norm", below(0.2), 0.2, SINK),
    ("dormant", "first_key_mass", above(0.3), 0.3, {"relative_norm": 0.1}),
    ("peaked", "normalized_entropy", below(0.1), 0.1, {"max_weight": 0.95}),
    ("peaked", "max_weight", above(0.9), 0.9, {"normalized_entropy": 0.05}),
    ("diffuse", "normalized_entropy", above(0.95), 0.95, {}),
    ("over-peaked", "entropy", below(1.0), 1.0, {}),
    ("previous-token", "previous_token", above(0.4), 0.4, {}),
    ("self", "self_token", above(0.4), 0.4, {}),
    ("induction", "induction", above(0.4), 0.4, {}),
    ("hedging", "score_variance", above(4.0), 4.0, {}),
    ("committed", "score_variance", below(0.25), 0.25, {"normalized_entropy": 0.05}),
    ("committed", "normalized_entropy", below(0.1), 0.1, {"score_variance": 0.1}),
]


@pytest.mark.parametrize(("rule", "statistic", "beyond", "threshold", "rest"), EDGES)
def test_a_rule_applies_beyond_its_threshold(rule, statistic, beyond, threshold, rest):
    assert rule in rules(find(record({**rest, statistic: beyond})))
    assert rule not in rules(find(record({**rest, statistic: threshold})))


def test_every_rule_is_in_the_table_of_edges():
    everything = {f.rule for f in find(record({}) | {"heads": [{"layer": 0, "head": 0, "mean": {}}]})}
    assert everything == {rule for rule, *_ in EDGES}


def test_a_plain_head_has_no_finding():
    assert find(record({}, {})) == []


def test_a_finding_has_all_its_fields():
    [finding] = find(record({}, {"max_scores": 120.0}))
    assert (finding.layer, finding.head, finding.value, finding.threshold) == (3, 1, 120.0, 100.0)
    assert finding.severity == "alarm"
    assert "120" in finding.message and "100" in finding.message
    assert "QK-clip" in finding.remedy and "Kimi" in finding.source
    for f in find(inspection()):
        assert f.message and f.why and f.remedy and f.source


def test_thresholds_are_arguments():
    heads = record({"max_scores": 120.0, "induction": 0.3})
    assert rules(find(heads, Thresholds(max_score=130.0, induction=0.2))) == {"induction"}
    assert find(heads, Thresholds(induction=0.2))[-1].threshold == 0.2
    with pytest.raises(ValueError, match="sink: expected a number, got nan"):
        Thresholds(sink=math.nan)
    with pytest.raises(TypeError, match="thresholds: expected a Thresholds"):
        find(heads, {"sink": 0.2})


def test_the_largest_score_counts_not_its_mean():
    heads = record({"max_scores": 150.0})
    heads["heads"][0]["mean"] = {**PLAIN, "max_scores": 20.0}
    [finding] = find(heads)
    assert finding.value == 150.0


def test_a_peak_on_a_known_position_is_a_note():
    peak = {"normalized_entropy": 0.05, "max_weight": 0.95}
    found = find(record(peak, {**peak, "previous_token": 0.9}))
    assert [(f.head, f.severity) for f in found if f.rule == "peaked"] == [(0, "warning"), (1, "note")]
    assert "previous-token" in next(f.message for f in found if f.rule == "peaked" and f.head == 1)


def test_consistently_over_peaked_is_a_warning_for_the_model():
    low, sink = {"entropy": 0.5}, {"entropy": 0.5, "first_key_mass": 0.9}

    def model(found):
        return [f for f in found if f.rule == "over-peaked" and f.layer is None]

    [finding] = model(find(record(low, low, {})))
    assert (finding.severity, finding.threshold) == ("warning", 0.5)
    assert finding.value == pytest.approx(2 / 3)
    assert model(find(record(low, low, {}, {}))) == []  # half is not more than half
    assert model(find(record(low, sink, sink, {}))) == []  # sinks do not count


def test_a_missing_scale_is_flagged_and_a_scaled_model_is_not():
    def model(record):
        return [f for f in find(record) if f.rule == "over-peaked" and f.severity == "warning"]

    assert model(inspection(views=False)) == []
    [finding] = model(inspection(views=False, gain=math.sqrt(32)))
    assert finding.value > 0.5 and "scale" in finding.remedy


def test_the_entropy_rule_explains_its_dependence_on_the_length():
    [finding] = [f for f in find(record({"entropy": 0.5})) if f.layer is not None]
    assert "H / log n 0.5" in finding.message
    assert "depends on the length" in finding.why
    # The numbers of its text: a row of two keys has less than 1 nat, and 1 nat is 12 % of the maximum at 4096 keys.
    assert math.log(2) < 1 < math.log(3)
    assert round(1 / math.log(4096), 2) == 0.12


def test_the_entropy_rule_is_not_checked_on_short_rows():
    heads = record({"entropy": 0.5})
    heads["positions"] = {"edges": [0, 1, 2, 4], "rows": [1, 1, 1], "null_entropy": [[0.0, 0.693, 1.1]], "values": {}}
    [finding] = find(heads)
    assert finding.layer is None and finding.value is None
    assert "uniform plan has a mean entropy of only 0.598 nats" in finding.message
    heads["positions"]["rows"] = [1, 1, 20]
    assert rules(find(heads)) == {"over-peaked"}


@pytest.mark.parametrize("statistic", PLAIN)
def test_a_missing_statistic_skips_its_rules_and_is_reported(statistic):
    heads = record({}, {})
    for entry in heads["heads"]:
        for kind in ("mean", "max", "min"):
            entry[kind] = {name: value for name, value in entry[kind].items() if name != statistic}
    heads["statistics"] = [name for name in heads["statistics"] if name != statistic]
    found = find(heads)
    # max_weight is not read if the entropy is not low
    assert all(f.layer is None and f.value is None and f.severity == "note" for f in found)
    assert all(f.message == f"not checked: {statistic} was not recorded" for f in found)
    assert {f.rule for f in found} == {rule for rule, name, *_ in EDGES if name == statistic} | (
        {"hedging"} if statistic == "normalized_entropy" else set()
    )


def test_a_statistic_missing_in_one_head_is_counted():
    heads = record({"induction": None}, {"induction": 0.9})
    found = find(heads)
    assert [(f.rule, f.head) for f in found if f.layer is not None] == [("induction", 1)]
    assert [f.message for f in found if f.layer is None] == [
        "not checked for 1 of 2 heads: in this text no token occurs again, which induction needs"
    ]


def test_the_most_severe_first_then_in_order():
    found = find(inspection())
    ranks = [("alarm", "warning", "note").index(f.severity) for f in found]
    assert ranks == sorted(ranks)
    places = [(f.layer, f.head) for f in found if f.rule == "diffuse"]
    assert len(places) > 1 and places == sorted(places)


def test_constructed_heads_are_found():
    places = {}
    for f in find(inspection()):
        places.setdefault((f.layer, f.head), set()).add(f.rule)
    assert {"previous-token", "peaked"} <= places[0, 0]
    assert "diffuse" in places[0, 1]
    assert {"sink", "first-token"} <= places[0, 2]
    assert "self" in places[0, 3]
    assert "induction" in places[1, 0]
    assert {"sink", "dormant", "committed"} <= places[1, 1]
    assert {"logit-alarm", "peaked"} <= places[2, 0]


def trained(scaling: float | None) -> Inspection:
    """A small Llama with a large initialisation after a few steps on a text; `scaling` None is 1/√d."""
    text = resources.files("regard.inspection").joinpath("sample.txt").read_text()
    alphabet = sorted(set(text))
    tokens = torch.tensor([alphabet.index(character) for character in text])
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    none = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = transformers.LlamaConfig(vocab_size=len(alphabet), initializer_range=0.14, **size, **none)
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation(regard.hf.register())
    if scaling is not None:
        for layer in model.model.layers:
            layer.self_attn.scaling = scaling
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(60):
        batch = tokens[torch.randint(len(tokens) - 64, (8, 1)) + torch.arange(64)]
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    return regard.inspect(model, tokens[: 8 * 64].view(8, 64), patterns=True)


def test_a_model_trained_without_scaling_is_flagged_and_a_healthy_one_is_not():
    flagged = trained(1.0)
    severe = {f.rule for f in flagged.findings() if f.severity in ("alarm", "warning")}
    assert severe == {"logit-alarm", "peaked", "over-peaked"}
    assert flagged.findings()[0].severity == "alarm"
    assert verdict(flagged.record(), flagged.findings()).startswith(("2 alarms", "3 alarms", "4 alarms"))
    healthy = trained(None)
    assert [f for f in healthy.findings() if f.severity in ("alarm", "warning")] == []
    assert verdict(healthy.record(), healthy.findings()).startswith("Nothing alarming.")
    # and by a wide margin
    assert flagged.mean("normalized_entropy").mean() < 0.1 < 0.35 < healthy.mean("normalized_entropy").mean()
    assert flagged.maximum("max_scores").max() > 100 > 40 > healthy.maximum("max_scores").max()


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([], TypeError, "record: expected a dict"),
        ({}, ValueError, "record: expected format 'regard-inspection', version 1 or 2, got None, version None"),
        ({"format": "regard-inspection", "version": 3}, ValueError, "1 or 2, got 'regard-inspection', version 3"),
        ({**record({}), "heads": []}, ValueError, "record: expected a list of at least one in 'heads', got \\[\\]"),
        ({**record({}), "statistics": None}, ValueError, "at least one in 'statistics', got None"),
    ],
)
def test_what_is_not_a_record_raises(bad, error, message):
    with pytest.raises(error, match=message):
        find(bad)


def test_find_does_not_change_the_record():
    heads = inspection()
    before = copy.deepcopy(heads)
    find(heads)
    assert heads == before


@pytest.mark.parametrize(
    ("heads", "line"),
    [
        ([{}], "Nothing alarming. No rule applies to its 1 head."),
        ([SINK, {}], "Nothing alarming. Of 2 heads: 1 sink."),
        ([{"entropy": 0.5}, {}], "Nothing alarming. Of 2 heads: 1 over-peaked."),
        ([{"induction": None}], "Nothing alarming. No rule applies to its 1 head. Not checked: induction."),
        ([{"max_scores": 120.0}, {}], "1 alarm (logit-alarm in layer 3, head 0: 120 against 100)."),
        ([{"max_scores": 120.0}] * 2, "2 alarms (logit-alarm in 2 heads)."),
        ([{"normalized_entropy": 0.05, "max_weight": 0.95}, {}], "1 warning (peaked in layer 3, head 0: 0.05 against"),
        ([{"entropy": 0.5}], "1 warning (over-peaked: 1 of 1 heads, sinks not counted, have a mean entropy less"),
    ],
)  # fmt: skip
def test_verdict(heads, line):
    heads = record(*heads)
    text = verdict(heads, find(heads))
    assert text.startswith(line)
    assert "\n" not in text
