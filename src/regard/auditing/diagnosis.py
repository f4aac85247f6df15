"""Which wrong attention it is: the diagnosis of cases that failed.

For each failed case every hypothesis is solved, and those whose results are the function's to rounding explain it. The
name that explains the most cases is reported first, then the one that explains the most of the rest. Cases that no
single change explains are compared with pairs of changes, and with the same attention in lower precision. What is left
is named by what is wrong: the output, lse or a gradient.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .calls import Call, admissible
from .cases import Case
from .hypotheses import HYPOTHESES, Change, Hypothesis
from .outcomes import Disagreement, Outcome, Parts, agrees, allowances, definition

UNEXPLAINED = ("wrong-output", "wrong-lse", "wrong-gradient")  # names where the mistake is not known
MOST_PAIRS = 2500  # of changes that are tried in one audit
COARSE = 0.2  # of the largest entry of a part: a larger error is no rounding to half precision
REJECTED = 100.0  # times the allowed error: further away, a hypothesis is given up without its gradients
_OWN_NAMES = {"attn_mask": "bias-gradient"}  # of the gradient of a leaf; else "<leaf>-gradient"


@dataclass
class Failure:
    """A case whose results are not those of the definition."""

    case: Case
    outcome: Outcome
    truth: Parts
    allowed: Parts
    wrong: list[Disagreement]
    explained: dict[str, str] = field(default_factory=dict)  # name -> sentence
    jointly: bool = False  # these explain it together, not each by itself

    @property
    def worst(self) -> Disagreement:
        return max(self.wrong, key=lambda one: one.error / one.allowed)


@dataclass(frozen=True)
class Diagnosis:
    name: str
    sentence: str
    failures: tuple[Failure, ...]


def diagnose(failures: list[Failure]) -> list[Diagnosis]:
    """One diagnosis for each name, with the cases that show it."""
    candidates: list[Hypothesis] = []  # that explained a case before: tried first
    fruitless: Counter[tuple] = Counter()  # searches that found nothing, by the kind of case
    imprecise = 0  # of them, in cases that are right to half precision
    for failure in failures:
        kind = _kind(failure.case)
        of_parameters = {f"gradient of {name}" for name in (*failure.case.learned, "sink", "attn_mask")}
        if all(one.part in of_parameters for one in failure.wrong):
            failure.explained = _gradients_alone(failure, candidates)
        if not failure.explained:
            known = imprecise > 2 and _finite(failure) and _is_coarse(failure)
            failure.explained = _single_changes(failure, candidates, search=fruitless[kind] < 2 and not known)
            failure.explained = failure.explained or _gradients_alone(failure, candidates)
        fruitless[kind] += not failure.explained
        imprecise += not failure.explained and _finite(failure) and _is_coarse(failure)
    for failure in failures:
        if not failure.explained:
            failure.explained = _explanations(failure, candidates)
    # A result that is mostly NaN has many explanations: in a case of its own kind, only those that others show count.
    plain = {name for failure in failures if failure.case.exposes is None for name in failure.explained}
    for failure in failures:
        if failure.case.exposes is not None:
            failure.explained = {name: text for name, text in failure.explained.items() if name in plain}
    found: list[Diagnosis] = []
    rest = _covered(failures, found)
    rest = [failure for failure in rest if not _by_its_rows(failure, found)]
    rest = [failure for failure in rest if not _beside_rows_left_empty(failure, found)]
    rest = [failure for failure in rest if not _as_in_float32(failure, found)]
    rest = _low_precision(rest, found)
    base_is_right = not any(failure.case.exposes is None for failure in rest)
    named = [f for f in rest if f.case.exposes is not None and _shows_its_kind(f, base_is_right)]
    for name in dict.fromkeys(f.case.exposes for f in named):
        assert name is not None
        found.append(Diagnosis(name, _EXPOSED[name], tuple(f for f in named if f.case.exposes == name)))
    rest = _pairs([failure for failure in rest if failure not in named], found)
    found += _unexplained(rest)
    return _merged(found)


_EXPOSED = {
    "empty-row": "a row without admissible keys is not 0",
    "masked-nan": "NaN or inf in keys that every query masks reaches the results",
    "lowest-mask": "a mask filled with the dtype's lowest number gives a wrong result",
    "overflow": "large scores overflow: the maximum is not subtracted, or too late",
    "strides": "inputs that are not contiguous are read wrongly",
    "precision": "sums over many keys are kept in half precision, where they no longer grow",
}
FINITE_EXPOSED = ("lowest-mask", "overflow", "strides", "precision")
PRECISION = (
    "the result is right to half precision only: products or sums are kept in a smaller type than the inputs need"
)


def _shows_its_kind(failure: Failure, base_is_right: bool) -> bool:
    """Whether the failure of a case of a special kind means what the case is for."""
    return not _finite(failure) or (base_is_right and failure.case.exposes != "masked-nan")


def _finite(failure: Failure) -> bool:
    """Whether everything is finite that should be."""
    return all(
        bool(found.isfinite()[truth.isfinite()].all())
        for name, truth in failure.truth.items()
        if (found := failure.outcome.parts.get(name)) is not None
    )


# --- single changes ---------------------------------------------------------------------------------------------------


def _kind(case: Case) -> tuple:
    """Which terms a case has. If nothing explains two cases of a kind, others of it are not searched."""
    query, key = (case.layout(case.leaves)[name] for name in ("query", "key"))
    mask = None if case.mask is None else case.mask.dtype
    shape = (query.shape[1] != key.shape[1], query.shape[2] != key.shape[2])
    return (mask, "attn_mask" in case.leaves, case.is_causal, case.scale is None, *shape)


def _single_changes(failure: Failure, candidates: list[Hypothesis], search: bool) -> dict[str, str]:
    """The hypotheses that explain a case. Those that explained an earlier case are tried first, and the others only if
    none of them does."""
    found = _explanations(failure, candidates)
    if found or not search:
        return found
    mine = [hypothesis for hypothesis in HYPOTHESES if matches(failure, hypothesis.change)]
    candidates += [hypothesis for hypothesis in mine if hypothesis not in candidates]
    return _explanations(failure, mine, known=True)


def _explanations(failure: Failure, hypotheses: list[Hypothesis], known: bool = False) -> dict[str, str]:
    found: dict[str, str] = {}
    for hypothesis in hypotheses:
        if hypothesis.name not in found and (known or matches(failure, hypothesis.change)):
            found[hypothesis.name] = hypothesis.sentence
    return found


def matches(failure: Failure, change: Change) -> bool:
    """Whether the function's results are those of the changed attention, to rounding, in one of the right readings of
    the case's arguments."""
    other = failure.case.also_right
    return _matches(failure, change) or (other is not None and _matches(failure, lambda call: change(other(call))))


def _matches(failure: Failure, change: Change) -> bool:
    case, outcome, allowed = failure.case, failure.outcome, failure.allowed
    try:
        forward = definition(case, outcome, change, forward_only=True)
        if forward is None:
            return False
        near = {n: torch.full_like(allowed[n], REJECTED * float(allowed[n].max())) for n in forward if n in allowed}
        if not agrees({name: outcome.parts[name] for name in near}, {n: forward[n] for n in near}, near):
            return False
        expected = definition(case, outcome, change)
        assert expected is not None
        if agrees(expected, failure.truth, allowed):  # the change makes no difference here, so it explains nothing
            return False
        own = allowances(case, outcome, expected, change)
    except (ValueError, TypeError, RuntimeError):  # the change has no meaning for this problem
        return False
    either = {name: torch.maximum(own[name], allowed[name]) if name in allowed else own[name] for name in own}
    return agrees(outcome.parts, expected, either)


def _covered(failures: list[Failure], found: list[Diagnosis]) -> list[Failure]:
    """Add the names that explain the most failures; return those without one."""
    order = {name: n for n, name in enumerate(dict.fromkeys(h.name for h in HYPOTHESES))}
    joint = [failure for failure in failures if failure.jointly and failure.explained]
    for failure in joint:
        found += [Diagnosis(name, text, (failure,)) for name, text in failure.explained.items()]
    rest = [failure for failure in failures if failure not in joint]
    while True:
        counts = Counter(name for failure in rest for name in failure.explained)
        if not counts:
            return rest
        best = min(counts, key=lambda name: (-counts[name], order.get(name, len(order))))
        mine = [failure for failure in rest if best in failure.explained]
        sentence = Counter(failure.explained[best] for failure in mine).most_common(1)[0][0]
        found.append(Diagnosis(best, sentence, tuple(mine)))
        rest = [failure for failure in rest if best not in failure.explained]


# --- gradients of single leaves ---------------------------------------------------------------------------------------


def _gradients_alone(failure: Failure, candidates: list[Hypothesis]) -> dict[str, str]:
    """If only gradients are wrong: a factor, or a missing part of the sum, in each of them. The factor of one becomes a
    candidate for other cases."""
    leaves = [one.part.removeprefix("gradient of ") for one in failure.wrong]
    if any(not one.part.startswith("gradient of ") for one in failure.wrong):
        return {}
    reasons = [_of_leaf(failure, leaf) for leaf in leaves]
    if any(reason is None for reason in reasons):
        return {}
    if {reason[0] for reason in reasons if reason is not None} == {"group"}:
        return {"gqa-gradient": "the gradient of a shared key head comes from one of its query heads only"}
    names = [_OWN_NAMES.get(leaf, f"{leaf}-gradient") for leaf in leaves]
    texts = [reason[1] for reason in reasons if reason is not None]
    failure.jointly = len(names) > 1
    if leaves[0] in ("query", "key", "value") and len(leaves) == 1 and reasons[0] and reasons[0][0] == "factor":
        candidates.append(Hypothesis(names[0], texts[0], _with_factor(leaves[0], reasons[0][2])))
    return dict(zip(names, texts, strict=True))


def _with_factor(name: str, factor: float) -> Change:
    """The gradient of one argument times a factor."""

    def change(call: Call) -> Call:
        tensor: Tensor = getattr(call, name)
        return call.change(**{name: factor * tensor + (tensor - factor * tensor).detach()})

    return change


def _of_leaf(failure: Failure, leaf: str) -> tuple[str, str, float] | None:
    """What is wrong with the gradient of one leaf: a kind, a sentence, and the factor if it is one."""
    part, case = f"gradient of {leaf}", failure.case
    got, truth, allowed = failure.outcome.parts[part], failure.truth[part], failure.allowed[part]
    for kind, words, weights in _PARTIAL:
        reduced = definition(case, failure.outcome, reweighted=lambda w, f=weights: f(w, case))
        assert reduced is not None
        if kind == "group" and leaf not in ("key", "value"):
            continue
        if agrees({part: got}, {part: reduced[part]}, {part: allowed}):
            return kind, f"the gradient of {leaf} {words}", math.nan
    usable = truth.isfinite() & got.isfinite()
    size = float((truth[usable] ** 2).sum())
    factor = float((got[usable] * truth[usable]).sum()) / size if size else 0.0
    bound = allowed * max(1.0, abs(factor))
    if not size or not agrees({part: got}, {part: truth * factor}, {part: bound}):
        return None
    if abs(factor) < 1e-6:
        return "factor", f"the {leaf} acts on the output but receives no gradient", 0.0
    return "factor", f"the gradient of {leaf} is {factor:.4g} times the right one", factor


def _only_batch(index: int):
    def weights(w: Tensor, case: Case) -> Tensor:
        kept = torch.zeros_like(w)
        kept[index] = w[index]
        return kept

    return weights


def _only_in_group(index: int):
    def weights(w: Tensor, case: Case) -> Tensor:
        group = w.shape[1] // case.layout(case.leaves)["key"].shape[1]
        kept = torch.zeros_like(w)
        kept[:, index % group :: group] = w[:, index % group :: group]
        return kept

    return weights


_PARTIAL = (
    ("batch", "is that of the first batch entry only", _only_batch(0)),
    ("batch", "is that of the last batch entry only", _only_batch(-1)),
    ("group", "comes from the first query head of each group only", _only_in_group(0)),
    ("group", "comes from the last query head of each group only", _only_in_group(-1)),
)


# --- rows, precision, pairs -------------------------------------------------------------------------------------------


def _by_its_rows(failure: Failure, found: list[Diagnosis]) -> bool:
    """Whether the output is wrong only in rows without admissible keys."""
    output = next((one for one in failure.wrong if one.part == "output"), None)
    if output is None:
        return False
    empty = ~admissible(failure.case.call(failure.case.leaves)).any(-1)  # [B, H, Tq]
    if not bool(empty.any()) or bool((output.where & ~empty[..., None]).any()):
        return False
    found.append(Diagnosis("empty-row", _EXPOSED["empty-row"], (failure,)))
    return True


def _beside_rows_left_empty(failure: Failure, found: list[Diagnosis]) -> bool:
    """Whether a known mistake leaves some rows without keys, where the output is NaN, and explains all others."""
    output, kinds = failure.outcome.parts["output"], {one.name for one in found}
    if _finite(failure):
        return False
    for hypothesis in HYPOTHESES:
        if hypothesis.name not in kinds or not _applies(hypothesis, failure.case.call(failure.case.leaves)):
            continue
        changed = hypothesis.change(failure.case.call(failure.case.leaves))
        parts = definition(failure.case, failure.outcome, hypothesis.change, forward_only=True)
        if changed is None or changed.compute is not None or parts is None:
            continue
        empty = ~admissible(changed).any(-1)[..., None]  # [B, H, Tq, 1]
        masked = {"output": output.where(~(empty & output.isnan()), 0.0)}
        if bool(empty.any()) and agrees(masked, {"output": parts["output"]}, failure.allowed):
            found.append(Diagnosis(hypothesis.name, hypothesis.sentence, (failure,)))
            return True
    return False


def _as_in_float32(failure: Failure, found: list[Diagnosis]) -> bool:
    """Whether the same gradient alone is wrong in half precision that is explained in another case."""
    parts = {one.part for one in failure.wrong}
    if failure.case.dtype not in (torch.float16, torch.bfloat16) or "output" in parts:
        return False
    for one in found:
        if any(parts == {wrong.part for wrong in other.wrong} for other in one.failures):
            found.append(Diagnosis(one.name, one.sentence, (failure,)))
            return True
    return False


def _low_precision(rest: list[Failure], found: list[Diagnosis]) -> list[Failure]:
    """Those failures that are not the definition in lower precision; the others are added as one diagnosis."""
    coarse = [failure for failure in rest if _finite(failure) and _is_coarse(failure)]
    mine = coarse if any(failure.case.exposes in (None, "overflow") for failure in coarse) else []
    if mine:
        found.append(Diagnosis("precision", PRECISION, tuple(mine)))
    return [failure for failure in rest if failure not in mine]


def _is_coarse(failure: Failure) -> bool:
    case, outcome, truth = failure.case, failure.outcome, failure.truth
    if case.dtype in (torch.float16, torch.bfloat16):
        limit = {name: 8 * allowed for name, allowed in failure.allowed.items()}
        return agrees(outcome.parts, truth, limit)
    sizes = {name: float(part[part.isfinite()].abs().max()) for name, part in truth.items() if part.isfinite().any()}
    if any(one.error > COARSE * sizes.get(one.part, 0.0) for one in failure.wrong):
        return False
    return any(
        agrees(outcome.parts, truth, allowances(case, outcome, truth, dtype=dtype))
        for dtype in (torch.float16, torch.bfloat16)
    )


def _pairs(rest: list[Failure], found: list[Diagnosis]) -> list[Failure]:
    """Those failures that no two changes explain; the others are added."""
    known = [name for diagnosis in found for name in [diagnosis.name]]
    ordered = sorted(HYPOTHESES, key=lambda h: h.name not in known)
    tries = itertools.count()
    useful: list[tuple[Hypothesis, Hypothesis]] = []
    left = []
    for failure in rest:
        pair = None
        if any(one.part == "output" for one in failure.wrong):
            pair = next((p for p in useful if matches(failure, both(*p))), None)
            pair = pair or _search(failure, ordered, tries)
        if pair is None:
            left.append(failure)
            continue
        if pair not in useful:
            useful.append(pair)
        for one, other in (pair, pair[::-1]):
            found.append(Diagnosis(one.name, f"{one.sentence} (together with {other.name})", (failure,)))
    return left


def _search(failure: Failure, ordered: list[Hypothesis], tries: Iterator[int]) -> tuple[Hypothesis, Hypothesis] | None:
    call = failure.case.call(failure.case.leaves)
    usable = [h for h in ordered if _applies(h, call)]
    for first, second in itertools.combinations(usable, 2):
        if first.name == second.name:
            continue
        if next(tries) >= MOST_PAIRS:
            return None
        if matches(failure, both(first, second)):
            return first, second
    return None


def _applies(hypothesis: Hypothesis, call: Call) -> bool:
    try:
        return hypothesis.change(call) is not None
    except (ValueError, TypeError, RuntimeError):
        return False


def both(first: Hypothesis, second: Hypothesis) -> Change:
    """Two changes, one after the other."""

    def change(call: Call) -> Call | None:
        once = first.change(call)
        if once is None:
            return None
        if once.compute is None:
            return second.change(once)
        twice = second.change(call)  # a computation of its own comes last
        return None if twice is None or twice.compute is not None else first.change(twice)

    return change


# --- the rest ---------------------------------------------------------------------------------------------------------


def _unexplained(rest: list[Failure]) -> list[Diagnosis]:
    found = []
    for failure in rest:
        parts = [one.part for one in failure.wrong]
        leaves = [part.removeprefix("gradient of ") for part in parts if part.startswith("gradient of ")]
        if "output" in parts:
            name, words = "wrong-output", "the output is wrong, and no single known mistake or pair of them explains it"
            if not _finite(failure):
                words = "the output is NaN or inf where the definition is finite"
        elif "lse" in parts:
            name, words = "wrong-lse", "the output is right and lse is wrong"
        elif len(leaves) == 1:
            name, words = _OWN_NAMES.get(leaves[0], f"{leaves[0]}-gradient"), f"the gradient of {leaves[0]} is wrong"
        elif "sink" in leaves:
            name, words = "sink-gradient", f"the gradients of {', '.join(leaves)} are wrong"
        else:
            name, words = "wrong-gradient", f"the gradients of {', '.join(leaves)} are wrong"
        found.append(Diagnosis(name, words, (failure,)))
    return found


def _merged(found: list[Diagnosis]) -> list[Diagnosis]:
    """One diagnosis for each name, with the sentence of the first."""
    names = dict.fromkeys(one.name for one in found)
    return [
        Diagnosis(
            name,
            next(one.sentence for one in found if one.name == name),
            tuple(failure for one in found if one.name == name for failure in one.failures),
        )
        for name in names
    ]
