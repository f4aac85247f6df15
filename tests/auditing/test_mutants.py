"""Every known mistake, rebuilt as a mutant of a correct function: `regard.audit` finds it and names it."""

import functools

import pytest
import torch

import regard
from regard import Causal, Rows, Transport
from support.mutants import MUTANTS, SINKS, attend

PROBLEMS = list({(m.problem, m.softcap, str(m.options)): m for m in MUTANTS}.values())
# What a mutant may show besides: it reads masked keys, or has no float masks at all.
BESIDES = {"masked-nan", "bias-dropped", "lowest-mask"}


@pytest.mark.parametrize("mutant", PROBLEMS, ids=lambda m: f"{m.problem} {m.softcap or ''} {list(m.options)}")
def test_the_correct_function_passes(mutant):
    found = regard.audit(mutant.function(bug=""), mutant.problem, softcap=mutant.softcap)
    assert found.passed and not found.findings, str(found)
    assert found.gradients and len(found.cases) > 30


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.bug} {m.problem or ''}")
def test_a_mutant_is_named(mutant):
    found = regard.audit(mutant.function(), mutant.problem, softcap=mutant.softcap, gradients=mutant.in_gradients)
    names = {finding.name for finding in found.findings}
    assert mutant.finding in names, str(found)
    assert names <= BESIDES | {mutant.finding}, str(found)
    assert found.passed == (mutant.finding == "lse-sink"), str(found)  # a convention, so a warning


def test_there_are_enough_mutants():
    assert len({mutant.bug for mutant in MUTANTS}) >= 30


def test_the_diagnosis_is_a_sentence():
    found = regard.audit(functools.partial(attend, bug="no sink"), SINKS)
    (finding,) = found.findings
    assert finding.message == "this is attention without its sink"
    assert finding.error > 1000 * finding.allowed and finding.case in finding.cases


def test_two_mistakes_at_once():
    """A function without its sink that also repeats heads as blocks: both are named, also where both act."""

    def both(query, key, value, sink=None, **options):
        group = query.shape[1] // key.shape[1]
        options.pop("enable_gqa", None)
        return attend(query, key.repeat(1, group, 1, 1), value.repeat(1, group, 1, 1), **options)

    found = regard.audit(both, Transport(marginal=Rows(sink=torch.zeros(4))), gradients=False)
    assert {finding.name for finding in found.findings} == {"sink-dropped", "gqa-order"}, str(found)


def test_the_wild():
    """gpt-oss sinks that `**kwargs` swallows (prime-rl 3397), a mask that is dropped (NeMo Automodel 2622)."""

    def swallows(query, key, value, attn_mask=None, is_causal=False, scale=None, **kwargs):
        return regard.attention(query, key, value, attn_mask, 0.0, is_causal, scale, kwargs.get("enable_gqa", False))

    problem = Transport(prior=Causal(), marginal=Rows(sink=torch.zeros(8)))
    assert [f.name for f in regard.audit(swallows, problem, gradients=False).findings] == ["sink-dropped"]

    def drops(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
        return regard.attention(query, key, value, None, 0.0, is_causal, scale, enable_gqa)

    assert "mask-dropped" in {f.name for f in regard.audit(drops, gradients=False).findings}
