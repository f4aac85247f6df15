"""The mods of FlexAttention, traced. What a score_mod adds to the score is found on its graph.

score_mod(score, ...) = score + rest, where `rest` does not depend on the score; rest = -inf is a mask. Anything else
raises Untraceable with the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from .graph import BOOL, REAL, Builder, Graph, Untraceable, pruned
from .numbers import trace_numbers
from .pairs import INPUTS, as_log_prior
from .tracing import Traced


def traced_score_mod(score_mod: Callable[..., Tensor]) -> Traced:
    """log pi of a score_mod."""
    try:
        return trace_numbers(score_mod, (("score", REAL), *INPUTS)).map(additive_part)
    except Untraceable as error:
        if "tanh" in str(error) and "softcap" not in str(error):  # an approximation of tanh
            raise Untraceable(f"{error} (a softcap: use attention(softcap=...))") from error
        raise


def traced_mask_mod(mask_mod: Callable[..., Tensor]) -> Traced:
    """log pi of a mask_mod."""
    found = trace_numbers(mask_mod, INPUTS)
    if found.graph.nodes[found.graph.outputs[0]].kind != BOOL:
        raise Untraceable("it returned numbers, where truth values were expected")
    return found.map(as_log_prior)


def additive_part(graph: Graph) -> Graph:
    """The graph of `rest`."""
    depends = ["score" in names for names in graph.depends()]
    (output,) = graph.outputs
    if not depends[output]:
        raise Untraceable("its result does not depend on the score: return score + something, or use regard.prior")
    g = Builder(graph.nodes)

    def rest_of(n: int) -> int:
        """The node `rest`, where node n is score + rest."""
        node = graph.nodes[n]
        with_score = [a for a in node.args if depends[a]]
        if node.op == "input":
            return g.real(0.0)
        if node.op == "add" and len(with_score) == 1:
            (other,) = (a for a in node.args if a != with_score[0])
            return g.add(rest_of(with_score[0]), g.cast(other, "real"))
        if node.op == "sub" and with_score == [node.args[0]]:
            return g.sub(rest_of(node.args[0]), node.args[1])
        if node.op == "where" and not depends[node.args[0]]:
            return g.where(node.args[0], *(rest_of(a) if depends[a] else masked(a) for a in node.args[1:]))
        raise Untraceable(_remedy(graph, depends, n))

    def masked(n: int) -> int:
        """A branch without the score: -inf, in every case."""
        node = graph.nodes[n]
        if node.op == "where":
            return g.where(node.args[0], masked(node.args[1]), masked(node.args[2]))
        if node.op == "constant" and node.value == -math.inf:
            return n
        raise Untraceable(
            "it replaces the score by something other than -inf: mask a pair with -inf, or add to the score"
        )

    return pruned(g.nodes, INPUTS, graph.slots, (rest_of(output),))


def _remedy(graph: Graph, depends: list[bool], n: int) -> str:
    node = graph.nodes[n]
    used = {graph.nodes[m].op for m in range(len(graph.nodes)) if depends[m]}
    if "tanh" in used:
        return "it is not additive in the score (torch.tanh of the score is a softcap: use attention(softcap=...))"
    if node.op == "log":
        return (
            "it is not additive in the score (torch.log of the score): weights that are another function of the score "
            "are a regulariser, as in Transport(FDivergence(f, link), marginal=Free())"
        )
    if node.op in ("mul", "div", "neg"):
        return (
            "it multiplies the score, so it is not additive: use Transport(temperature=...) or attention(scale=...) "
            "for a factor"
        )
    if node.op == "where":
        return "it is not additive in the score (the score decides torch.where): only score + something is a prior"
    return f"it is not additive in the score (torch.{node.op} of the score): only score + something is a prior"
