"""Listening to a transformers model: while it is watched, its attention is computed by regard, with statistics."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import inspect as signatures
import itertools
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import describe
from ..features import STATISTICS as FEATURES_STATISTICS
from ..features import Features
from ..form import Form
from ..lowering import lower
from ..operator import attention
from ..plan import weights_at
from ..priors import Documents, Prior, Window
from ..problem import Rows, RowsAndColumns, Transport
from ..regularizers import KL
from ..statistics import ROW_STATISTICS, AuxRequest
from .result import DERIVED, PATTERNS, Inspection, Layer, position_bins
from .views import Views

_watchers = itertools.count()
_listeners: dict[str, Recorder] = {}  # who listens now, by the name under which a model finds him
SAVE_EVERY = 10.0  # seconds between two writes of a run file


@contextlib.contextmanager
def watch(model: nn.Module, *, statistics: Iterable[str] | None = None, patterns: bool = False) -> Iterator[Inspection]:
    """Record the attention of a transformers model while the block runs, in a loop of your own.

    The Inspection fills as the model is called; forward passes that activation checkpointing repeats are not counted
    twice. Afterwards the model is as it was. `statistics`: names of `AuxRequest`'s fields; None is all that the model's
    problem defines but `key_mass`, which costs most. `patterns` adds the mean weight on the query's own key, on the one
    before it and on those that follow an earlier copy of its token (about one more pass over the keys).
    """
    recorder = Recorder(model, statistics, patterns)
    with recorder.listening():
        yield recorder.inspection


def inspect(
    model: nn.Module,
    inputs: Any,
    *,
    statistics: Iterable[str] | None = None,
    patterns: bool = False,
    views: bool = False,
    tokenizer: Any = None,
    batch_size: int | None = None,
    run: str | Path | None = None,
    progress: bool | None = None,
) -> Inspection:
    """Run a transformers model over inputs and see what its attention does.

    `inputs`: token ids [T] or [B, T], a dict of the model's arguments, or an iterable of such; `batch_size` cuts what
    is larger. `statistics` and `patterns` as in `watch`. `views` takes a close look at the first sequence, for the
    report: a window of each plan, the top keys of some queries, their path along the temperature; `tokenizer` gives the
    tokens' text. With `run=FILE` the state is written there now and then and at an interruption, and the same call
    continues from it. `progress` (None: on a terminal) shows how far it is.
    """
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size: expected a positive int or None, got {describe(batch_size)}")
    recorder = Recorder(model, statistics, patterns)
    if views:
        recorder._need_plans("views")
    if run is not None and Path(run).exists():
        begun = Inspection.load(run)
        if views and begun.batches and not begun.about.get("views", begun.views):  # of the first batch, which is done
            raise ValueError(f"views: expected False, as {str(run)!r} was begun without them, or another run file")
        recorder.resume(begun, run)
    elif views:
        recorder.inspection.about["views"] = (
            True  # asked for; there are none where a model's layers have no common plan
        )
    result = recorder.inspection
    began = time.monotonic()
    done, seen, digest, saved = result.batches, 0, hashlib.sha256(), time.monotonic()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with recorder.listening(), torch.no_grad(), _progress(inputs, batch_size, progress) as advance:
            for batch in _batches(inputs, batch_size):
                seen += 1
                _feed(digest, batch)
                if seen == done and digest.hexdigest() != result.digest:
                    raise ValueError(f"run: expected the inputs that {str(run)!r} was begun with, got others")
                if seen > done:
                    recorder.views = Views() if views and seen == 1 else None
                    recorder.forward(batch)
                    if recorder.views is not None:
                        names = [layer.name for layer in result.layers]
                        result.views = recorder.views.finish(names, _texts(batch, tokenizer))
                    _count(result.about, batch)
                    result.batches, result.digest = seen, digest.hexdigest()
                    if run is not None and time.monotonic() - saved > SAVE_EVERY:
                        result.save(run)
                        saved = time.monotonic()
                advance()
            if seen < done:
                raise ValueError(f"run: {str(run)!r} has seen {done} batches, but the inputs have {seen}")
    finally:
        result.about["seconds"] = round(result.about.get("seconds", 0.0) + time.monotonic() - began, 2)
        for module, training in modes:
            module.training = training
        if run is not None and result.batches > done:
            result.save(run)
    return result


# --- the inputs -------------------------------------------------------------------------------------------------------


def _batches(inputs: Any, batch_size: int | None) -> Iterator[dict[str, Any]]:
    """The model's arguments, batch by batch."""
    expected = "token ids [T] or [B, T], a dict of the model's arguments, or an iterable of such"
    if not isinstance(inputs, Iterable):
        raise TypeError(f"inputs: expected {expected}, got {describe(inputs)}")
    for item in [inputs] if isinstance(inputs, Tensor | Mapping) else inputs:
        if isinstance(item, Mapping):
            batch = dict(item)
        elif isinstance(item, Tensor) and item.dim() in (1, 2) and not item.is_floating_point():
            batch = {"input_ids": item if item.dim() == 2 else item[None]}
        elif isinstance(item, Sequence) and item and all(isinstance(token, int) for token in item):
            batch = {"input_ids": torch.tensor([item])}
        else:
            raise TypeError(f"inputs: expected {expected}, got {describe(item)}")
        ordered = [batch.get("input_ids"), *batch.values()]
        B = next((value.shape[0] for value in ordered if isinstance(value, Tensor) and value.dim()), 1)
        step = B if batch_size is None else batch_size
        for start in range(0, B, max(1, step)):
            yield {
                name: value[start : start + step] if isinstance(value, Tensor) and value.shape[:1] == (B,) else value
                for name, value in batch.items()
            }


def _feed(digest: Any, batch: dict[str, Any]) -> None:
    for name, value in batch.items():
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _count(about: dict[str, Any], batch: dict[str, Any]) -> None:
    """Tokens, sequences and the longest of them, so far."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if isinstance(ids, Tensor) and ids.dim() == 2:
        padded = isinstance(mask, Tensor) and mask.dim() == 2
        lengths = mask.sum(-1) if isinstance(mask, Tensor) and padded else torch.full((ids.shape[0],), ids.shape[1])
        about["tokens"] = about.get("tokens", 0) + int(lengths.sum())
        about["sequences"] = about.get("sequences", 0) + ids.shape[0]
        about["longest"] = max(about.get("longest", 0), int(lengths.max()))


def _texts(batch: dict[str, Any], tokenizer: Any) -> list[str] | None:
    """The first sequence, token by token; without a tokenizer its ids."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor):
        return None
    row = ids[0].tolist()
    return [str(i) for i in row] if tokenizer is None else [tokenizer.decode([i]) for i in row]


@contextlib.contextmanager
def _progress(inputs: Any, batch_size: int | None, wanted: bool | None) -> Iterator[Callable[[], None]]:
    """A bar on the terminal's error stream, and what moves it."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    sized = isinstance(inputs, Tensor | Mapping | Sequence)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("inspecting", total=sum(1 for _ in _batches(inputs, batch_size)) if sized else None)
        yield lambda: bar.advance(task)


# --- the recorder -----------------------------------------------------------------------------------------------------


class Recorder:
    """Puts itself in the place of a model's attention, computes it, and adds what it saw to an Inspection."""

    def __init__(self, model: nn.Module, statistics: Iterable[str] | None, patterns: bool) -> None:
        from .. import hf  # here, not above: it needs transformers

        self.hf, self.model = hf, model
        modules = hf.check(model)
        self.names = {id(module): name for name, module in model.named_modules()}
        order = range(len(modules))
        own = [n for module in modules.values() if isinstance(n := getattr(module, "layer_idx", None), int)]
        numbers = own if len(set(own)) == len(modules) else order  # a hybrid's layers keep their own
        self.indices = {id(module): n for module, n in zip(modules.values(), numbers, strict=True)}
        self.ours: dict[str | None, str] = {}
        self._look()
        if patterns:
            self._need_plans("patterns")
        self.inspection = Inspection(self._statistics(statistics), self._about(), patterns=patterns)
        self.views: Views | None = None
        self.found: dict[int, Layer] = {}
        self.parameters = {
            id(module): list(signatures.signature(module.forward).parameters) for module in self._listened()
        }
        self.frames: list[_Frame] = []  # calls under way, the innermost last
        self.told_of_padding = False
        self.crossing: dict[int, bool] = {}  # of an attention: whether it reads another sequence than its own

    def _listened(self) -> Iterator[nn.Module]:
        """The model, its parts that take tokens (they may be called on their own, or with a mask made inside), and
        its attentions."""
        for module in self.model.modules():
            takes = signatures.signature(module.forward).parameters.keys() & _INPUTS
            if module is self.model or takes or id(module) in self.indices:
                yield module

    def _look(self) -> None:
        """Which implementations the model names now, and the name under which it finds us instead of each: the same one
        each time, so that a compiled model knows it again."""
        self.configs = self.hf.configurations_of(self.model)
        names = {config._attn_implementation_internal for config in self.configs}
        # Somebody may listen already: what he found beneath him is the problem, and he is told of every call.
        self.beneath = {name: _listeners[name] for name in names if name in _listeners}
        self.problems = {
            name: self.beneath[name].problem_under(name) if name in self.beneath else self.hf.problem_of(name)
            for name in names
        }
        for name in names - self.ours.keys():
            self.ours[name] = f"regard-watch-{next(_watchers)}"

    def problem_under(self, ours: str) -> Transport | Features | None:
        """The problem that the model solves under one of our names."""
        return next(problem for name, problem in self.problems.items() if self.ours[name] == ours)

    def _statistics(self, wanted: Iterable[str] | None) -> tuple[str, ...]:
        if wanted is None:
            common = set(ROW_STATISTICS) - {"key_mass"}
            for problem in self.problems.values():
                if isinstance(problem, Features):
                    common &= set(FEATURES_STATISTICS)
                    continue
                request = AuxRequest.all(problem)
                common &= {name for name in ROW_STATISTICS if getattr(request, name)}
            return tuple(name for name in ROW_STATISTICS if name in common)
        wanted = [wanted] if isinstance(wanted, str) else list(wanted)
        for name in wanted:
            if name not in ROW_STATISTICS:
                raise ValueError(f"statistics: expected names among {', '.join(ROW_STATISTICS)}, got {describe(name)}")
        return tuple(name for name in ROW_STATISTICS if name in wanted)

    def _need_plans(self, name: str) -> None:
        for problem in self.problems.values():
            if isinstance(problem, Features):
                raise ValueError(
                    f"{name}: expected False for attention by features ({problem!r}), which has no plan to look into"
                )

    def _about(self) -> dict[str, Any]:
        import transformers

        from .. import __version__

        weights = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            weights.update(f"{name}{list(parameter.shape)}".encode())
            weights.update(parameter.detach().flatten()[:64].float().cpu().numpy().tobytes())
        config = getattr(self.model, "config", None)
        return {
            "model": type(self.model).__name__,
            "checkpoint": str(getattr(config, "_name_or_path", "") or ""),
            "model_type": str(getattr(config, "model_type", "") or ""),
            "heads": getattr(config, "num_attention_heads", None),
            "kv_heads": getattr(config, "num_key_value_heads", None),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "weights": weights.hexdigest(),
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "problems": {str(name): repr(problem or Transport()) for name, problem in self.problems.items()},
            "regard": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def resume(self, begun: Inspection, run: str | Path) -> None:
        for what, got, expected in (
            ("statistics", begun.statistics, self.inspection.statistics),
            ("patterns", begun.patterns, self.inspection.patterns),
            *((key, begun.about.get(key), self.inspection.about[key]) for key in ("model", "weights", "problems")),
        ):
            if got != expected:
                raise ValueError(f"run: {str(run)!r} was begun with other {what}: expected {expected}, got {got}")
        by_name = {layer.name: layer for layer in begun.layers}
        self.inspection = begun
        self.found = {key: by_name[name] for key, name in self.names.items() if name in by_name}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While the block runs the model's attention is ours; then everything is as before."""
        self._look()
        self.before = [(config, config._attn_implementation_internal) for config in self.configs]
        installed: list[str] = []
        hooks: list[Any] = []
        try:
            for name, problem in self.problems.items():
                self.hf.install(self.ours[name], self._attention_function(problem, self.beneath.get(name)))
                installed.append(self.ours[name])
                _listeners[self.ours[name]] = self
            for config, name in self.before:
                config._attn_implementation_internal = self.ours[name]
            for module in self._listened():
                if id(module) in self.indices:
                    hooks.append(module.register_forward_pre_hook(self._before_attention, with_kwargs=True))
                else:
                    hooks.append(module.register_forward_pre_hook(self._before_part, with_kwargs=True))
                    hooks.append(module.register_forward_hook(self._after_part, always_call=True))
            yield
        finally:
            for config, name in self.before:
                if config._attn_implementation_internal == self.ours[name]:
                    config._attn_implementation_internal = name
                else:  # who began to listen after us has not ended yet: he is to leave what we found
                    for other in set(_listeners.values()) - {self}:
                        other.before = [
                            (c, name if c is config and given == self.ours[name] else given)
                            for c, given in other.before
                        ]
                        if self.ours[name] in other.ours:
                            other.ours[name] = other.ours[self.ours[name]]
            for name in installed:
                self.hf.remove(name)
                _listeners.pop(name, None)
            for name in self.beneath:  # who lends us his name lends it once
                del self.ours[name]
            for hook in hooks:
                hook.remove()
            self.frames.clear()

    def forward(self, batch: dict[str, Any]) -> None:
        """One pass; one that fails in the middle leaves no trace."""
        device = next(self.model.parameters()).device
        batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        for name, value in (("use_cache", False), ("logits_to_keep", 1)):  # nobody reads what they would keep
            if name in self.parameters[id(self.model)] and "labels" not in batch:
                batch.setdefault(name, value)
        before = [layer.copy() for layer in self.inspection.layers]
        try:
            self.model(**batch)
        except BaseException:
            self.inspection.layers[:] = before
            names = {layer.name: layer for layer in before}
            self.found = {key: names[layer.name] for key, layer in self.found.items() if layer.name in names}
            raise

    def _before_part(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(self.parameters[id(module)], args, strict=False)) | kwargs
        cache: Any = arguments.get("past_key_values")
        past = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
        self.frames.append(_Frame(module, arguments, past))

    def _after_part(self, module: nn.Module, *_: Any) -> None:
        while self.frames and self.frames.pop().module is not module:
            pass  # what an exception left behind

    def _before_attention(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(self.parameters[id(module)], args, strict=False)) | kwargs
        self.crossing[id(module)] = any(arguments.get(name) is not None for name in _OTHERS)

    def _attention_function(
        self, problem: Transport | Features | None, beneath: Recorder | None
    ) -> Callable[..., tuple[Tensor, None]]:
        @torch.compiler.disable
        def function(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
        ) -> tuple[Tensor, None]:
            if id(module) not in self.indices:  # of another model that shares the configuration
                return self.hf._attend(problem, module, query, key, value, attention_mask, **kwargs)
            transport = None if isinstance(problem, Features) else problem
            call = self.hf.as_call(transport, module, query, key, value, attention_mask, **kwargs)
            position_ids = kwargs.get("position_ids")
            out = self._attend_by(problem, module, dict(call), position_ids)
            listener = beneath
            while listener is not None:  # a pass of their own for those who began before us; dropout is drawn once
                if listener in _listeners.values():
                    listener._attend_by(problem, module, {**call, "dropout_p": 0.0}, position_ids)
                listener = next(iter(listener.beneath.values()), None)
            return out.transpose(1, 2).contiguous(), None

        return function  # type: ignore[return-value]

    def _attend_by(
        self, problem: Transport | Features | None, module: nn.Module, call: dict[str, Any], position_ids: object
    ) -> Tensor:
        if isinstance(problem, Features):
            return self._attend_by_features(problem, module, call, position_ids)
        return self._attend(module, call, position_ids)

    def _counts(self) -> bool:
        """Whether the pass under way is to be recorded: in backward, checkpointing repeats one that was."""
        return torch._C._current_graph_task_id() == -1

    def _attend(self, module: nn.Module, call: dict[str, Any], position_ids: object) -> Tensor:
        statistics = self.inspection.statistics
        B, H, Tq, _ = call["query"].shape
        Tk = call["key"].shape[2]
        place = self._place(module, B, Tq, Tk, position_ids)
        real = None if place.real is None else place.real.to(call["query"].device)
        first = place.first
        problem = call["problem"] or Transport()
        plain = isinstance(problem.regularizer, KL)
        wanted = {*statistics, "max_scores", "entropy", *(("support",) if plain else ())}
        if self.inspection.patterns and AuxRequest.all(problem).lse:
            wanted.add("lse")
        columns = isinstance(problem.marginal, RowsAndColumns)  # whose padding takes no part
        if not columns and (real is not None or torch.is_grad_enabled()):  # a checkpoint's second pass sees no padding
            wanted.discard("key_mass")
        out, aux = self.hf.attend(module, call, AuxRequest(**dict.fromkeys(wanted, True)))
        if not self._counts():
            return out
        with torch.no_grad():
            by_query, by_key = (None, None)
            if not plain or "key_mass" in statistics:
                by_query, by_key = admissible(lower(**call), real)
            keys = aux.support if plain else by_query
            assert keys is not None and aux.entropy is not None and aux.max_scores is not None
            log_keys = self.hf.counted_keys(module, problem, keys).clamp(min=1).log().expand(B, H, Tq)
            values = {name: getattr(aux, name) for name in statistics if name != "key_mass"}
            plan = {name: call[name] for name in _PLAN}
            if "first_key_mass" in statistics:
                if first is not None:  # a sequence that does not begin at key 0
                    index = first.clamp(min=0)[:, None, :, None].to(call["query"].device)
                    values["first_key_mass"] = weights_at(index=index, **plan).squeeze(-1)
                seen = sees_first(lower(**call), first)
                values["first_key_mass"] = torch.where(seen, values["first_key_mass"], torch.nan)
            values |= {
                "output_norm": out.float().norm(dim=-1),
                "log_keys": log_keys,
                "normalized_entropy": torch.where(log_keys > 0, aux.entropy / log_keys, torch.nan),
            }
            if self.inspection.patterns:
                values |= self._patterns(plan, aux.lse, place)
            if self.views is not None and (real is not None or place.cross):
                self.views.refuse()
            elif self.views is not None:
                self.views.add(self.names.get(id(module), type(module).__name__), call, plan)
            valid = aux.max_scores > -torch.inf
            if real is not None:
                valid = valid & real[:, None]
            layer = self._layer(module, H)
            layer.add(values, valid, place.bins)
            if "key_mass" in statistics:
                mass = aux.key_mass
                if mass is None:  # again, without the queries that are padding
                    if real is not None:
                        readers = Documents(real.long() - 1, torch.zeros(Tk, dtype=torch.long, device=real.device))
                        call["problem"] = _narrowed(problem, readers)
                    mass = attention(**call, return_aux=AuxRequest(key_mass=True))[1].key_mass
                assert mass is not None and by_key is not None
                layer.add_keys(mass, by_key, place.key_bins)
        return out

    def _attend_by_features(
        self, features: Features, module: nn.Module, call: dict[str, Any], position_ids: object
    ) -> Tensor:
        """As `_attend`, with the statistics that attention by features has."""
        statistics = self.inspection.statistics
        B, H, Tq, _ = call["query"].shape
        place = self._place(module, B, Tq, call["key"].shape[2], position_ids)
        real = None if place.real is None else place.real.to(call["query"].device)
        if real is not None and "key_mass" in statistics:
            raise ValueError("statistics: expected no key_mass for padded batches of attention by features")
        request = AuxRequest(**dict.fromkeys((*statistics, "mass"), True))
        out, aux = features(**self.hf.as_features_call(module, call), return_aux=request)
        if not self._counts():
            return out
        with torch.no_grad():
            by_query, by_key = admissible(lower(**call), real)
            values = {name: getattr(aux, name) for name in statistics if name != "key_mass"}
            if "first_key_mass" in statistics and place.first is not None:  # it is of key 0: elsewhere there is none
                begins = (place.first == 0)[:, None].to(out.device)
                values["first_key_mass"] = torch.where(begins, values["first_key_mass"], torch.nan)
            values |= {
                "output_norm": out.float().norm(dim=-1),
                "log_keys": by_query.clamp(min=1).log().expand(B, H, Tq),
                "normalized_entropy": torch.full_like(aux.mass, torch.nan),
            }
            valid = aux.mass > 0 if real is None else (aux.mass > 0) & real[:, None]
            layer = self._layer(module, H)
            layer.add(values, valid, place.bins)
            if "key_mass" in statistics:
                layer.add_keys(aux.key_mass, by_key, place.key_bins)
        return out

    def _patterns(self, plan: dict[str, Any], lse: Tensor | None, place: _Place) -> dict[str, Tensor]:
        """Weights [B, H, Tq] on chosen keys, exactly; NaN where a query has no such key."""
        query, first = plan["query"], place.first
        B, H, Tq, _ = query.shape
        none = torch.full((B, H, Tq), torch.nan, dtype=torch.float32, device=query.device)
        if Tq != plan["key"].shape[2] or place.cross:  # a cache, or the keys of another sequence
            return dict.fromkeys(PATTERNS, none)
        own = torch.arange(Tq, device=query.device)
        begins = own[None] == (torch.zeros_like(own)[None] if first is None else first.to(own.device))  # [B|1, Tq]
        near = weights_at(index=torch.stack([own, (own - 1).clamp(min=0)], -1), **plan).float()
        previous = torch.where(begins[:, None], torch.nan, near[..., 1])
        induction = none if lse is None else self._induction(plan, lse, none, begins)
        return {"self_token": near[..., 0], "previous_token": previous, "induction": induction}

    def _induction(self, plan: dict[str, Any], lse: Tensor, none: Tensor, begins: Tensor) -> Tensor:
        """Mass on the keys that follow an earlier copy of the query's token: by token, a packing of its own."""
        ids = None
        for frame in reversed(self.frames):  # a part may be given embeddings by who was given the tokens
            ids = frame.arguments.get("input_ids")
            if ids is not None or frame.arguments.get("encoder_hidden_states") is not None:
                break
        problem = plan["problem"] or Transport()
        rows = isinstance(problem.marginal, Rows) and problem.marginal.relax is None and problem.marginal.mass == 1
        if not isinstance(ids, Tensor) or ids.shape != none.shape[::2] or not rows:
            return none
        ids = ids.to(none.device)
        before = torch.where(begins, -1, ids.roll(1, 1))  # the token before each key, in its own sequence
        copies = _narrowed(problem, Documents(ids, before))
        # Only keys up to the query's own: what follows a later copy is not induction.
        past = Transport(copies.regularizer, prior=_past(copies.prior), marginal=Rows(), temperature=copies.temperature)
        narrowed: dict[str, Any] = {**plan, "problem": past}
        chosen = attention(**narrowed, value=plan["key"][..., :1], return_aux=AuxRequest(lse=True))[1].lse
        assert chosen is not None
        return torch.where(chosen > -torch.inf, (chosen - lse).exp(), torch.nan)

    def _layer(self, module: nn.Module, heads: int) -> Layer:
        key = id(module)
        if key not in self.found:
            name = self.names.get(key, type(module).__name__)
            channels = tuple(n for n in self.inspection.statistics if n != "key_mass") + DERIVED
            channels += PATTERNS if self.inspection.patterns else ()
            self.found[key] = Layer.empty(name, self.indices.get(key, len(self.found)), heads, channels)
            self.inspection.layers.append(self.found[key])
            order = {name: n for n, name in enumerate(self.names.values())}
            self.inspection.layers.sort(key=lambda layer: order.get(layer.name, len(order)))
        return self.found[key]

    def _place(self, module: nn.Module, B: int, Tq: int, Tk: int, position_ids: object) -> _Place:
        """Where an attention's queries and keys stand; layers of one call share it."""
        frame = self.frames[-1] if self.frames else _Frame(self.model, {})
        cross = self.crossing.get(id(module), False)
        key = (B, Tq, Tk, cross)
        if key not in frame.places:
            if position_ids is None:
                position_ids = frame.arguments.get("position_ids")
            frame.places[key] = self._find_place(frame, B, Tq, Tk, cross, position_ids)
        return frame.places[key]

    def _find_place(self, frame: _Frame, B: int, Tq: int, Tk: int, cross: bool, position_ids: object) -> _Place:
        mask = self._padding(Tq)
        past = frame.past
        gone = 0 if cross else max(0, past + Tq - Tk)  # keys that the cache of a window has dropped
        real, key_positions = None, torch.arange(gone, gone + Tk)[None]
        first = torch.full((1, Tq), -1) if gone else None
        if mask is not None and mask.shape[0] == B and past + Tq <= mask.shape[1] and not bool(mask.all()):
            standing = (mask.cumsum(-1) - 1).clamp(min=0)
            real, positions = mask[:, past : past + Tq], standing[:, past : past + Tq]
            if not cross:
                begin = mask.long().argmax(-1, keepdim=True) - gone
                first = begin.expand(B, Tq) if bool(begin.any()) else None
                key_positions = (key_positions - mask.long().argmax(-1, keepdim=True)).clamp(min=0)
                known = standing[:, gone : gone + Tk]
                key_positions[:, : known.shape[1]] = known
        elif isinstance(position_ids, Tensor) and position_ids.dim() == 2 and position_ids.shape[1] == Tq:
            # Packed sequences, or padding that is spelled out in a larger mask: they count from their own beginning.
            positions = position_ids.cpu()
            begin = (torch.arange(past, past + Tq) - positions).clamp(min=0)
            if not cross and bool(begin.any()):
                first = begin - gone
                key_positions = positions if Tq == Tk else (key_positions - begin[:, -1:]).clamp(min=0)
        else:
            positions = torch.arange(past, past + Tq)[None]
        theirs = frame.arguments.get("encoder_attention_mask")
        if cross and isinstance(theirs, Tensor) and theirs.shape == (B, Tk):
            theirs = theirs.bool().cpu()
            key_positions = (theirs.cumsum(-1) - 1).clamp(min=0)
            begin = theirs.long().argmax(-1, keepdim=True)
            first = begin.expand(B, Tq) if bool(begin.any()) else None
        return _Place(cross, real, first, position_bins(positions), position_bins(key_positions))

    def _padding(self, Tq: int) -> Tensor | None:
        """Which tokens of the innermost call are real, [B, T]; None: all, or nobody says, or queries are not tokens."""
        for frame in reversed(self.frames):
            mask, tokens = frame.arguments.get("attention_mask"), frame.arguments.get("input_ids")
            tokens = frame.arguments.get("inputs_embeds") if tokens is None else tokens
            if tokens is None and isinstance(mask, Tensor) and mask.dim() == 2 and frame.arguments.keys() & _SOUND:
                return self._sounding(frame.module, mask, Tq)
            if mask is None or tokens is None or tokens.shape[1] != Tq:
                return None
            if isinstance(mask, Tensor) and mask.dim() == 2:
                return mask.bool().cpu()
            # else it was spelled out by who called this part, and knows the tokens' own
        return None

    def _sounding(self, module: nn.Module, mask: Tensor, Tq: int) -> Tensor | None:
        """The same of a model that hears: its mask is of samples or frames, its queries may be fewer."""
        shorten: Any = getattr(module, "_get_feature_vector_attention_mask", None)
        if mask.shape[1] != Tq and shorten is not None:
            # Before an adapter, where there is one: the attention is.
            before = {"add_adapter": False} if "add_adapter" in signatures.signature(shorten).parameters else {}
            mask = shorten(Tq, mask, **before)
        if mask.shape[1] == Tq:
            return mask.bool().cpu()
        if not bool(mask.all()) and not self.told_of_padding:
            self.told_of_padding = True
            warnings.warn(
                f"attention_mask: expected one of the {Tq} positions that {type(module).__name__} attends to, or a "
                f"model that says how it shortens one of {mask.shape[1]}; padding is counted as if it were sound",
                stacklevel=2,
            )
        return None


_INPUTS = frozenset(("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values"))
_SOUND = frozenset(("input_values", "input_features"))
_OTHERS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")  # keys are made of these


@dataclass(eq=False)
class _Place:
    """Where the queries and keys of an attention stand."""

    cross: bool  # the keys are of another sequence
    real: Tensor | None  # queries that are not padding, [B, Tq]; None: all
    first: Tensor | None  # the key at which each query's sequence begins, [B|1, Tq] (below 0: gone); None: key 0
    bins: Tensor  # of the queries' positions, [B|1, Tq]
    key_bins: Tensor  # of the keys', [B|1, Tk]


@dataclass(eq=False)
class _Frame:
    """A call under way: of the model, or of a part that takes tokens."""

    module: nn.Module
    arguments: dict[str, Any]
    past: int = 0  # tokens that its cache held before
    places: dict[tuple[int, int, int, bool], _Place] = field(default_factory=dict)


_PLAN = ("query", "key", "attn_mask", "scale", "enable_gqa", "problem", "softcap")  # what makes a plan


def _narrowed(problem: Transport, prior: Documents) -> Transport:
    prior_ = prior if problem.prior is None else problem.prior * prior
    return Transport(problem.regularizer, prior=prior_, marginal=problem.marginal, temperature=problem.temperature)


def sees_first(form: Form, first: Tensor | None = None) -> Tensor:
    """Which queries may read the first key of their sequence (broadcasts to [B, H, Tq]): not those that a window keeps
    from it, nor those whose cache has dropped it."""
    B, H, Tq, _ = form.shape
    assert form.query is not None
    device = form.query.device
    if first is None:
        mask = form.cut(slice(0, B), slice(0, H), slice(0, Tq), slice(0, 1)).admissible(Tq, 1, device)
        return (
            torch.ones(Tq, dtype=torch.bool, device=device)
            if mask is None
            else mask.expand(*mask.shape[:-2], Tq, 1)[..., 0]
        )
    seen = torch.zeros(B, H, Tq, dtype=torch.bool, device=device)
    for b, row in enumerate(first.expand(B, Tq)):
        keys, lengths = row.unique_consecutive(return_counts=True)
        stops = lengths.cumsum(0).tolist()
        for key, start, stop in zip(keys.tolist(), [0, *stops], stops, strict=False):
            if key >= 0:
                block = form.cut(slice(b, b + 1), slice(0, H), slice(start, stop), slice(key, key + 1))
                mask = block.admissible(stop - start, 1, device)
                seen[b, :, start:stop] = True if mask is None else mask.expand(1, H, stop - start, 1)[0, ..., 0]
    return seen


def _past(prior: Prior | None) -> Prior:
    """The prior without keys after the query's own (Tq = Tk)."""
    causal = Window(None, 0)
    return causal if prior is None else prior * causal


def admissible(form: Form, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys that each query may read [B, H|1, Tq], and (real) queries that may read each key [B, H|1, Tk]."""
    assert form.query is not None
    B, H, Tq, Tk = form.shape
    device = form.query.device
    by_query, by_key = [], torch.zeros(B, 1, Tk, device=device)
    for start in range(0, Tq, 256):
        rows = slice(start, min(Tq, start + 256))
        size = rows.stop - start
        mask = form.cut(slice(0, B), slice(0, H), rows, slice(0, Tk)).admissible(size, Tk, device)
        mask = torch.ones(1, 1, size, Tk, dtype=torch.bool, device=device) if mask is None else mask
        mask = mask.expand(B, mask.shape[-3] if mask.dim() > 2 else 1, size, Tk)
        by_query.append(mask.sum(-1))
        if real is not None:
            mask = mask & real[:, None, rows, None]
        by_key = by_key + mask.sum(-2)
    return torch.cat(by_query, -1), by_key
