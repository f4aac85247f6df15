"""`Recorder`: computes the attention of a transformers model while attached, and adds its statistics to an
`Inspection`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import hf
from .._compat import in_backward
from .._validate import describe
from ..backends import fused_statistics
from ..features import STATISTICS as FEATURES_STATISTICS
from ..features import Features
from ..lowering import lower
from ..operator import attention
from ..plan import weights_at
from ..priors import Documents
from ..problem import RowsAndColumns, Transport
from ..regularizers import KL, Tsallis
from ..statistics import ROW_STATISTICS, AuxOutput, AuxRequest
from . import provenance
from .layers import DERIVED, PATTERNS, Layer, derived_channels, nth_call, position_bins
from .patterns import count_admissible, pattern_weights, plan_arguments, sees_first_key, with_prior
from .result import Inspection
from .run_file import Partial
from .views import Views


class Recorder:
    """The listener of an `hf.Interception`."""

    def __init__(self, model: nn.Module, statistics: Iterable[str] | None, patterns: bool) -> None:
        self.model = model
        self.interception = hf.Interception(model, self)
        if patterns:
            self.check_has_plans("patterns")
        problems = {str(name): repr(problem or Transport()) for name, problem in self.interception.problems.items()}
        about = provenance.of_inspection(model, problems)
        about["declared"] = {str(name): provenance.as_json(p) for name, p in self.interception.problems.items()}
        self.inspection = Inspection(self.choose_statistics(statistics), about, patterns=patterns)
        self.views: Views | None = None  # filled by the pass under way, if it is the one to look at closely
        self._layers: dict[str, Layer] = {}  # by the name of the layer
        self._first_calls: dict[str, int] = {}  # by the name of the layer: its place in the order of the first calls
        self.calls = 0  # of the pass under way, so far
        self._known = 0  # its first calls, which an earlier process has recorded
        self.before: list[Layer] = []  # the layers before this pass
        self.before_call: Callable[[int, bool], None] = _ignore  # number of the call in its pass; was it recorded?
        self.after_call: Callable[[], None] = _ignore  # after a call was recorded

    def choose_statistics(self, wanted: Iterable[str] | None) -> tuple[str, ...]:
        """The statistics to record; by default all that every problem of the model defines and the fastest backend
        computes, except key_mass."""
        if wanted is None:
            common = set(fused_statistics()) - {"key_mass"}
            for problem in self.interception.problems.values():
                if isinstance(problem, Features):
                    common &= set(FEATURES_STATISTICS)
                    continue
                request = defined_statistics(problem)
                common &= {name for name in ROW_STATISTICS if getattr(request, name)}
            return tuple(name for name in ROW_STATISTICS if name in common)
        wanted = [wanted] if isinstance(wanted, str) else list(wanted)
        for name in wanted:
            if name not in ROW_STATISTICS:
                raise ValueError(f"statistics: expected names among {', '.join(ROW_STATISTICS)}, got {describe(name)}")
        return tuple(name for name in ROW_STATISTICS if name in wanted)

    def check_has_plans(self, option: str) -> None:
        """Raise if an attention of the model has no plan, which this option needs."""
        for problem in self.interception.problems.values():
            if isinstance(problem, Features):
                raise ValueError(f"{option}: expected False for attention by features ({problem!r}), which has no plan")

    def resume(self, begun: Inspection, run: str | Path) -> None:
        """Continue an inspection that was saved. Raises if it has another model, other statistics or patterns."""
        now = self.inspection.about
        for what, got, expected in (
            ("statistics", begun.statistics, self.inspection.statistics),
            ("patterns", begun.patterns, self.inspection.patterns),
            *((key, begun.about.get(key), self.inspection.about[key]) for key in ("model", "weights", "problems")),
            ("declared", begun.about.get("declared", now["declared"]), now["declared"]),  # 0.2 did not record it
        ):
            if got != expected:
                raise ValueError(f"run: {str(run)!r} was begun with other {what}: expected {expected}, got {got}")
        self.inspection = begun
        self._set_layers(begun.layers)
        self._first_calls = {layer.name: n for n, layer in enumerate(begun.layers)}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While the block runs the recorder computes the model's attention. Afterwards the model is as it was."""
        with self.interception.attached():
            yield

    def forward(self, batch: dict[str, Any], begun: Partial | None = None) -> None:
        """One forward pass. If it fails, nothing of it is recorded.

        `begun`: what an earlier process has recorded of this batch. The calls are computed again in the same way, so
        that the pass continues with the same numbers, and are not recorded again.
        """
        self.before = [layer.copy() for layer in self.inspection.layers]
        self.calls, self._known = 0, 0 if begun is None else begun.calls
        try:
            if begun is not None:
                self._set_layers([layer.copy() for layer in begun.layers])
            self.model(**hf.prepared(self.model, batch))
        except BaseException:
            self._set_layers(self.before)
            self._first_calls = {layer.name: n for n, layer in enumerate(self.before)}
            raise
        finally:
            self._known = 0

    def partial(self, digest: str) -> Partial:
        """What is recorded of the pass under way, after a call. `digest`: of the batches up to this one."""
        views = None if self.views is None else self.views.state()
        return Partial(digest, self.calls, [layer.copy() for layer in self.inspection.layers], views)

    def _set_layers(self, layers: list[Layer]) -> None:
        self.inspection.layers[:] = layers
        self._layers = {layer.name: layer for layer in layers}

    @property
    def layers(self) -> list[Layer]:
        """What was recorded, in the order of the model's modules."""
        return self.inspection.layers

    def clear(self) -> None:
        """Forget what was recorded."""
        self.inspection.layers.clear()
        self._layers.clear()

    # --- what the interception calls ----------------------------------------------------------------------------------

    def model_called(self) -> None:
        pass

    def model_returned(self) -> None:
        pass

    def counts(self) -> bool:
        """Whether the pass under way is recorded. One that checkpointing repeats was recorded the first time."""
        return not in_backward()

    def attend(self, call: hf.AttentionCall) -> Tensor:
        self.before_call(self.calls + 1, self.calls < self._known)
        if isinstance(call.problem, Features):
            return self._attend_by_features(call.problem, call)
        return self._attend_by_plan(call)

    def _attend_by_plan(self, call: hf.AttentionCall) -> Tensor:
        real = _real_queries(call)
        request = self._request(call.arguments["problem"] or Transport(), real is not None)
        out, aux = hf.attend(call.module, call.arguments, request)
        self._count(call, lambda: self._record(call, real, out, aux))
        return out

    def _count(self, call: hf.AttentionCall, record: Callable[[], None]) -> None:
        """Record a call, unless its pass does not count or an earlier process has recorded it."""
        if not self.counts():
            return
        self.calls += 1
        self._first_calls.setdefault(nth_call(call.name, call.depth + 1), len(self._first_calls))
        if self.calls <= self._known:
            return
        with torch.no_grad():
            record()
        self.after_call()

    def _request(self, problem: Transport, padded: bool) -> AuxRequest:
        """The statistics to compute together with the output."""
        wanted = {*self.inspection.statistics, "max_scores", "entropy"}
        if isinstance(problem.regularizer, KL):  # then the support contains every admissible key
            wanted.add("support")
        if self.inspection.patterns and AuxRequest.all(problem).lse:
            wanted.add("lse")
        # The mass of padding queries must not count. With both marginals they have none; otherwise key_mass needs a
        # pass of its own, as it does under checkpointing, whose second pass does not know the padding.
        both_marginals = isinstance(problem.marginal, RowsAndColumns)
        if not both_marginals and (padded or torch.is_grad_enabled()):
            wanted.discard("key_mass")
        return AuxRequest(**dict.fromkeys(wanted, True))

    def _record(self, call: hf.AttentionCall, real: Tensor | None, out: Tensor, aux: AuxOutput) -> None:
        """Add the rows of a call to its layer."""
        arguments, place, statistics = call.arguments, call.place, self.inspection.statistics
        B, H, Tq, _ = arguments["query"].shape
        problem, plan = arguments["problem"] or Transport(), plan_arguments(arguments)
        by_query = by_key = None
        if not isinstance(problem.regularizer, KL) or "key_mass" in statistics:
            by_query, by_key = count_admissible(lower(**arguments), real)
        keys = aux.support if isinstance(problem.regularizer, KL) else by_query
        assert keys is not None and aux.entropy is not None and aux.max_scores is not None
        log_keys = hf.counted_keys(call.module, problem, keys).clamp(min=1).log().expand(B, H, Tq)
        values = {name: getattr(aux, name) for name in statistics if name != "key_mass"}
        if "first_key_mass" in statistics:
            values["first_key_mass"] = self._first_key_mass(call, values["first_key_mass"])
        values |= derived_channels(out, aux.entropy, log_keys)
        if self.inspection.patterns:
            values |= pattern_weights(plan, aux.lse, place)
        if self.views is not None and (real is not None or place.is_cross):
            self.views.give_up()
        elif self.views is not None:
            self.views.add(nth_call(call.name, call.depth + 1), arguments, plan)
        valid = aux.max_scores != -torch.inf  # such a row has no key; one that is not a number counts
        if real is not None:
            valid = valid & real[:, None]
        layer = self._layer(call, H)
        layer.add(values, valid, position_bins(place.positions))
        if "key_mass" in statistics:
            mass = aux.key_mass if aux.key_mass is not None else _key_mass(arguments, real)
            assert by_key is not None
            layer.add_keys(mass, by_key, position_bins(place.key_positions))

    def _first_key_mass(self, call: hf.AttentionCall, on_key_0: Tensor) -> Tensor:
        """The weight on the first key of each query's sequence; NaN for queries that do not see it."""
        first, arguments = call.place.first, call.arguments
        mass = on_key_0
        if first is not None:  # some sequence does not begin at key 0
            index = first.clamp(min=0)[:, None, :, None].to(on_key_0.device)
            mass = weights_at(index=index, **plan_arguments(arguments)).squeeze(-1)
        return torch.where(sees_first_key(lower(**arguments), first), mass, torch.nan)

    def _attend_by_features(self, features: Features, call: hf.AttentionCall) -> Tensor:
        """As `_attend_by_plan`, with the statistics that attention by features has."""
        arguments, statistics, real = call.arguments, self.inspection.statistics, _real_queries(call)
        if real is not None and "key_mass" in statistics:
            raise ValueError("statistics: expected no key_mass for padded batches of attention by features")
        request = AuxRequest(**dict.fromkeys((*statistics, "mass"), True))
        out, aux = features(**hf.as_features_call(call.module, arguments), return_aux=request)
        self._count(call, lambda: self._record_features(call, real, out, aux))
        return out

    def _record_features(self, call: hf.AttentionCall, real: Tensor | None, out: Tensor, aux: Any) -> None:
        arguments, place, statistics = call.arguments, call.place, self.inspection.statistics
        B, H, Tq, _ = arguments["query"].shape
        by_query, by_key = count_admissible(lower(**arguments), real)
        values = {name: getattr(aux, name) for name in statistics if name != "key_mass"}
        if "first_key_mass" in statistics and place.first is not None:  # the statistic is about key 0 only
            begins = (place.first == 0)[:, None].to(out.device)
            values["first_key_mass"] = torch.where(begins, values["first_key_mass"], torch.nan)
        log_keys = by_query.clamp(min=1).log().expand(B, H, Tq)
        values |= derived_channels(out, torch.full_like(aux.mass, torch.nan), log_keys)  # there is no entropy
        valid = aux.mass != 0 if real is None else (aux.mass != 0) & real[:, None]
        layer = self._layer(call, H)
        layer.add(values, valid, position_bins(place.positions))
        if "key_mass" in statistics:
            layer.add_keys(aux.key_mass, by_key, position_bins(place.key_positions))

    def _layer(self, call: hf.AttentionCall, heads: int) -> Layer:
        """The layer of a call, created at the first one.

        Layers are in the order of the model's modules and have the numbers of the modules. If the model calls a module
        again in the same pass (layers that share their weights), each call is a layer, and all layers are numbered in
        the order of their first calls.
        """
        name = nth_call(call.name, call.depth + 1)
        if name not in self._layers:
            channels = tuple(n for n in self.inspection.statistics if n != "key_mass") + DERIVED
            channels += PATTERNS if self.inspection.patterns else ()
            self._layers[name] = Layer.empty(name, call.layer, heads, channels)
            self.inspection.layers.append(self._layers[name])
            self._order_layers()
        return self._layers[name]

    def _order_layers(self) -> None:
        """Sort the layers, and number them again if some share their weights."""
        order = {name: n for n, name in enumerate(self.interception.names.values())}
        if not self._first_calls.keys() <= order.keys():
            order = self._first_calls
            for layer in self.inspection.layers:
                layer.index = order[layer.name]
        self.inspection.layers.sort(key=lambda layer: order[layer.name])


def defined_statistics(problem: Transport | hf.Factory | None) -> AuxRequest:
    """The statistics that a problem defines; of a factory, those that every one-sided problem defines."""
    return AuxRequest.all(Transport(Tsallis(1.5)) if isinstance(problem, hf.Factory) else problem)


def _ignore(*_: Any) -> None:
    pass


def _real_queries(call: hf.AttentionCall) -> Tensor | None:
    """`Place.real` on the device of the call."""
    return None if call.place.real is None else call.place.real.to(call.arguments["query"].device)


def _key_mass(arguments: dict[str, Any], real: Tensor | None) -> Tensor:
    """The mass that each key receives from the queries that are not padding."""
    if real is not None:
        keys = torch.zeros(arguments["key"].shape[2], dtype=torch.long, device=real.device)
        problem = with_prior(arguments["problem"] or Transport(), Documents(real.long() - 1, keys))
        arguments = {**arguments, "problem": problem}
    mass = attention(**arguments, return_aux=AuxRequest(key_mass=True))[1].key_mass
    assert mass is not None
    return mass
