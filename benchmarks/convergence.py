"""How often do plans with both marginals (`RowsAndColumns`) converge? Random problems, checked by linear programming.

    python benchmarks/convergence.py [--problems 1000] [--temperature 1e-3] [--backend native] [--seed 0]

Each problem is small (4 to 24 queries and keys, float64) and has one head. Its seed decides its parts: dot products or
points in the plane; no prior, a weighted prior or a mask; equal or unequal marginals; one document or several.
`problem(seed)` builds it, `judge` checks the result:

- a plan exists if and only if a linear program can move all mass without using a masked pair (`ot.emd`);
- if a plan exists, regard must bring all but 1e-6 of the mass into the right columns, and its plan must be the optimum:
  not worse than the linear program's plan in the regularized objective, not better in the linear one;
- if none exists, regard must prove it.

Everything else counts as a failure, and the program exits with 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import regard
from regard import AuxRequest, Bias, Documents, RowsAndColumns, Transport

TEMPERATURES = (1e-1, 1e-2, 3e-3, 1e-3)
TOLERANCE = 1e-6  # the share of the mass that may be in a wrong column


@dataclass(frozen=True)
class Problem:
    name: str
    query: Tensor  # [1, 1, Tq, D], float64
    key: Tensor  # [1, 1, Tk, D]
    scale: float
    log_prior: Tensor | None  # [Tq, Tk]
    mask: Tensor | None  # [Tq, Tk], True = admissible
    row: Tensor  # [Tq]
    column: Tensor  # [Tk]
    query_ids: Tensor  # [Tq], the document of each query
    key_ids: Tensor  # [Tk]

    @property
    def scores(self) -> Tensor:
        return (self.query @ self.key.mT)[0, 0] * self.scale

    @property
    def admissible(self) -> Tensor:
        allowed = self.query_ids[:, None] == self.key_ids
        return allowed if self.mask is None else allowed & self.mask

    def transport(self, temperature: float, **settings: object) -> Transport:
        prior = Documents(self.query_ids, self.key_ids)
        if self.log_prior is not None:
            prior = prior * Bias(self.log_prior)
        marginal = RowsAndColumns(row=self.row, column=self.column, **settings)  # type: ignore[arg-type]
        return Transport(prior=prior, marginal=marginal, temperature=temperature)


def problem(seed: int) -> Problem:
    """A random problem. Remainders of the seed choose its parts, so that consecutive seeds give all combinations."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    geometry = ("dot", "points")[seed % 2]
    prior = ("plain", "weighted", "masked")[seed // 2 % 3]
    marginals = ("equal", "unequal")[seed // 6 % 2]
    documents = 1 if seed // 12 % 2 == 0 else int(torch.randint(2, 4, (), generator=g))
    Tq, Tk = (int(torch.randint(4, 25, (), generator=g)) for _ in range(2))
    if documents > 1 and Tq == Tk:
        Tk += 1  # documents of unequal lengths may look causal, which RowsAndColumns refuses where Tq = Tk
    if geometry == "dot":
        query, key, scale = normal(Tq, 4), normal(Tk, 4), 0.5
    else:  # -|x - y|^2 is 2 <x, y> and terms of x or y alone, which the prices absorb
        query, key = (torch.rand(n, 2, generator=g, dtype=torch.float64) for n in (Tq, Tk))
        scale = 2.0
    query_ids, key_ids = (_documents(n, documents, g) for n in (Tq, Tk))
    row, column = torch.ones(Tq, dtype=torch.float64), torch.ones(Tk, dtype=torch.float64)
    if marginals == "unequal":
        row, column = normal(Tq).exp(), normal(Tk).exp()
    for document in range(documents):  # in each document the keys receive as much as the queries send
        here = key_ids == document
        column[here] *= row[query_ids == document].sum() / column[here].sum()
    mask = None
    if prior == "masked":
        mask = torch.rand(Tq, Tk, generator=g) < 0.25 + 0.5 * torch.rand((), generator=g)
        same = query_ids[:, None] == key_ids
        mask |= ~(mask & same).any(1, keepdim=True) | ~(mask & same).any(
            0
        )  # every query and key has an admissible pair
        mask[0, -1] = True  # never causal, even by chance
    return Problem(
        f"{geometry}, {prior}, {marginals} marginals, {documents} documents",
        query[None, None],
        key[None, None],
        scale,
        2 * normal(Tq, Tk) if prior == "weighted" else None,
        mask,
        row,
        column,
        query_ids,
        key_ids,
    )


def _documents(n: int, documents: int, g: torch.Generator) -> Tensor:
    """The document of each position: consecutive and not empty."""
    cuts = torch.randperm(n - 1, generator=g)[: documents - 1].sort().values + 1
    return torch.bucketize(torch.arange(n), cuts, right=True)


def linear_program(given: Problem) -> Tensor | None:
    """The plan with the largest score among those with both marginals, or None if there is none."""
    plan = torch.zeros(len(given.row), len(given.column), dtype=torch.float64)
    for document in given.query_ids.unique():
        i, j = given.query_ids == document, given.key_ids == document
        mass = float(given.row[i].sum())
        a, b = (t.numpy() / t.sum().item() for t in (given.row[i], given.column[j]))
        cost, masked = -given.scores[i][:, j].numpy(), ~given.admissible[i][:, j].numpy()
        if ((_moved(a, b, masked.astype(float)) * masked).sum()) > 1e-9:
            return None
        penalty = 10 * (np.ptp(cost) + 1) / min(a.min(), b.min())
        plan[i[:, None] & j] = mass * torch.from_numpy(_moved(a, b, cost + penalty * masked)).flatten()
    return plan


def _moved(a: np.ndarray, b: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """The cheapest plan between two distributions."""
    import ot

    if min(cost.shape) == 1:  # there is only one plan, and ot.emd fails on it
        return a[:, None] * b
    cost = cost - cost.min()  # it also fails on some small problems with negative costs
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # ot.emd warns if it fails
        return ot.emd(a, b, cost, numItermax=10**6)


@dataclass(frozen=True)
class Verdict:
    """The result of a problem: `failure` is empty if the answer is right."""

    iterations: int
    proof: str
    failure: str


def judge(given: Problem, temperature: float, backend: str) -> Verdict:
    asked = AuxRequest(dual=True, column_dual=True, iterations=True, column_residual=True)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        _, aux = regard.attention(
            given.query, given.key, given.key, given.mask, scale=given.scale, backend=backend,
            problem=given.transport(temperature), return_aux=asked,
        )  # fmt: skip
    assert aux.iterations is not None
    messages = [str(w.message) for w in raised]
    iterations = int(aux.iterations.max())
    exact = linear_program(given)
    if exact is None:
        proofs = [m.partition("there is no plan: ")[2] for m in messages]
        return Verdict(iterations, proofs[0] if any(proofs) else "", "" if any(proofs) else "no plan, and no proof")
    if messages:
        return Verdict(iterations, "", messages[0])
    return Verdict(iterations, "", _compare(given, temperature, aux, exact))


def _compare(given: Problem, temperature: float, aux: regard.AuxOutput, exact: Tensor) -> str:
    """What is wrong with the plan of these prices, compared with the linear program's plan; "" if nothing is."""
    assert aux.dual is not None and aux.column_dual is not None
    prior = torch.zeros_like(exact) if given.log_prior is None else given.log_prior
    scores = given.scores
    exponent = (scores - aux.dual[0, 0, :, None] - aux.column_dual[0, 0]) / temperature + prior
    plan = torch.where(given.admissible, exponent, -torch.inf).exp()
    for document in given.query_ids.unique():
        i, j = given.query_ids == document, given.key_ids == document
        total = given.row[i].sum()
        for name, off in (("row", plan.sum(1)[i] - given.row[i]), ("column", plan.sum(0)[j] - given.column[j])):
            share = float(off.abs().sum() / total / 2)
            if not share <= 1.01 * TOLERANCE:
                return f"{share:.1e} of a document's mass is in a wrong {name}"

    def divergence(p: Tensor) -> float:
        return float((torch.xlogy(p, p) - p * torch.where(p > 0, prior, 0.0)).sum())

    best, mine = float((exact * scores).sum()), float((plan * scores).sum())
    # Moving the misplaced mass to the right columns changes either objective by at most `slack`.
    spread = scores.max() - scores.min() + temperature * (exponent[given.admissible].abs().max() + 10)
    slack = 4 * TOLERANCE * float(given.row.sum() * spread)
    if mine > best + slack:
        return f"scores {mine:.9g}, more than the linear program's {best:.9g}"
    gained = temperature * (divergence(exact) - divergence(plan))
    if best - mine > gained + slack:
        return f"scores {best - mine:.2e} less than the linear program, but its entropy gains only {gained:.2e}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=1000, help="random problems for each temperature and backend")
    parser.add_argument("--temperature", type=float, action="append", help="default: 1e-1, 1e-2, 3e-3, 1e-3")
    parser.add_argument("--backend", choices=("native", "torch"), action="append", help="default: both")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first problem")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failures = 0
    for backend in options.backend or ("native", "torch"):
        for temperature in options.temperature or TEMPERATURES:
            began = time.perf_counter()
            verdicts = {}
            for seed in range(options.seed, options.seed + options.problems):
                verdicts[seed] = judge(problem(seed), temperature, backend)
                if sys.stderr.isatty():
                    print(f"\r{backend} tau = {temperature:g}: {len(verdicts)}", end="", file=sys.stderr)
            wrong = {seed: v.failure for seed, v in verdicts.items() if v.failure}
            solved = sorted(v.iterations for v in verdicts.values() if not v.failure and not v.proof)
            tenth = solved[len(solved) * 9 // 10] if solved else 0
            proved = sum(bool(v.proof) for v in verdicts.values())
            print(
                f"\r{backend:<6} tau = {temperature:<6g} {len(solved)} plans found, {proved} proven not to exist, "
                f"{len(wrong)} failures; iterations: median {statistics.median(solved or [0]):.0f}, "
                f"90 % {tenth}, most {max(solved, default=0)}; "
                f"{1e3 * (time.perf_counter() - began) / options.problems:.0f} ms each",
                flush=True,
            )
            for seed, failure in list(wrong.items())[:10]:
                print(f"    seed {seed} ({problem(seed).name}): {failure}")
            failures += len(wrong)
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
