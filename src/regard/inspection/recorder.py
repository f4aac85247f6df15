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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..form import lower
from ..operator import attention
from ..parts import describe
from ..plan import weights_at
from ..problem import Documents, Prior, Rows, RowsAndColumns, Transport, Window
from ..regularizers import KL
from ..statistics import NAMES, AuxRequest
from .result import DERIVED, PATTERNS, Inspection, Layer, position_bins
from .views import Views

_watchers = itertools.count()
SAVE_EVERY = 10.0  # seconds between two writes of a run file


@contextlib.contextmanager
def watch(model: nn.Module, *, statistics: Iterable[str] | None = None, patterns: bool = False) -> Iterator[Inspection]:
    """Record the attention of a transformers model while the block runs, in a loop of your own.

    The Inspection fills as the model is called; forward passes that activation checkpointing repeats are not counted
    twice. Afterwards the model is as it was. `statistics`: names of `AuxRequest`'s fields; None is all that the model's
    problem defines but `key_mass`, which costs most. `patterns` adds the mean weight on the query's own key, on the one
    before it and on those that follow an earlier copy of its token (about one more pass over the keys).
    """
    recorder = _Recorder(model, statistics, patterns)
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
    recorder = _Recorder(model, statistics, patterns)
    if run is not None and Path(run).exists():
        recorder.resume(Inspection.load(run), run)
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


class _Recorder:
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
        self.configs = _configs(model)
        self.problems = {name: hf.problem_of(name) for name in {c._attn_implementation_internal for c in self.configs}}
        self.inspection = Inspection(self._statistics(statistics), self._about(), patterns=patterns)
        self.views: Views | None = None
        self.found: dict[int, Layer] = {}
        self.arguments: dict[str, Any] = {}
        self.forward_parameters = signatures.signature(model.forward).parameters

    def _statistics(self, wanted: Iterable[str] | None) -> tuple[str, ...]:
        if wanted is None:
            common = set(NAMES) - {"key_mass"}
            for problem in self.problems.values():
                request = AuxRequest.all(problem)
                common &= {name for name in NAMES if getattr(request, name)}
            return tuple(name for name in NAMES if name in common)
        wanted = [wanted] if isinstance(wanted, str) else list(wanted)
        for name in wanted:
            if name not in NAMES:
                raise ValueError(f"statistics: expected names among {', '.join(NAMES)}, got {describe(name)}")
        return tuple(name for name in NAMES if name in wanted)

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
        before = [(config, config._attn_implementation_internal) for config in self.configs]
        if any(str(name).startswith("regard-watch-") for _, name in before):
            raise RuntimeError("model: expected one that is not watched already")
        ours: dict[str | None, str] = {}
        hooks = (
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward, always_call=True),
        )
        try:
            for name, problem in self.problems.items():
                ours[name] = f"regard-watch-{next(_watchers)}"
                self.hf.install(ours[name], self._attention_function(problem))
            for config, name in before:
                config._attn_implementation_internal = ours[name]
            yield
        finally:
            for config, name in before:
                config._attn_implementation_internal = name
            for name in ours.values():
                self.hf.remove(name)
            for hook in hooks:
                hook.remove()
            self.arguments = {}

    def forward(self, batch: dict[str, Any]) -> None:
        """One pass; one that fails in the middle leaves no trace."""
        device = next(self.model.parameters()).device
        batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        for name, value in (("use_cache", False), ("logits_to_keep", 1)):  # nobody reads what they would keep
            if name in self.forward_parameters and "labels" not in batch:
                batch.setdefault(name, value)
        before = [layer.copy() for layer in self.inspection.layers]
        try:
            self.model(**batch)
        except BaseException:
            self.inspection.layers[:] = before
            names = {layer.name: layer for layer in before}
            self.found = {key: names[layer.name] for key, layer in self.found.items() if layer.name in names}
            raise

    def _before_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        bound = dict(zip(self.forward_parameters, args, strict=False))
        self.arguments = bound | kwargs

    def _after_forward(self, *_: Any) -> None:
        self.arguments = {}

    def _attention_function(self, problem: Transport | None) -> Callable[..., tuple[Tensor, None]]:
        @torch.compiler.disable
        def function(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
        ) -> tuple[Tensor, None]:
            call = self.hf.as_call(problem, module, query, key, value, attention_mask, **kwargs)
            out = self._attend(module, call, kwargs.get("position_ids"))
            return out.transpose(1, 2).contiguous(), None

        return function  # type: ignore[return-value]

    def _attend(self, module: nn.Module, call: dict[str, Any], position_ids: object) -> Tensor:
        statistics = self.inspection.statistics
        B, H, Tq, _ = call["query"].shape
        Tk = call["key"].shape[2]
        real, positions, key_positions, first = self._positions(module, B, Tq, Tk, position_ids)
        problem = call["problem"] or Transport()
        plain = isinstance(problem.regularizer, KL)
        wanted = {*statistics, "max_scores", "entropy", *(("support",) if plain else ())}
        columns = isinstance(problem.marginal, RowsAndColumns)  # whose padding takes no part
        if real is not None and not columns:
            wanted.discard("key_mass")
        out, aux = attention(**call, return_aux=AuxRequest(**dict.fromkeys(wanted, True)))
        if torch._C._current_graph_task_id() != -1:  # in backward: checkpointing repeats a pass, recorded before
            return out
        with torch.no_grad():
            by_query, by_key = (None, None)
            if not plain or "key_mass" in statistics:
                by_query, by_key = _admissible(call, real)
            keys = aux.support if plain else by_query
            assert keys is not None and aux.entropy is not None and aux.max_scores is not None
            sink = isinstance(problem.marginal, Rows) and problem.marginal.sink is not None
            log_keys = (keys + sink).clamp(min=1).log().expand(B, H, Tq)
            values = {name: getattr(aux, name) for name in statistics if name != "key_mass"}
            if first is not None and "first_key_mass" in statistics:  # a sequence that does not begin at key 0
                index = first[:, None, :, None].to(call["query"].device)
                values["first_key_mass"] = weights_at(index=index, **{name: call[name] for name in _PLAN}).squeeze(-1)
            values |= {
                "output_norm": out.float().norm(dim=-1),
                "log_keys": log_keys,
                "normalized_entropy": torch.where(log_keys > 0, aux.entropy / log_keys, torch.nan),
            }
            plan = {name: call[name] for name in _PLAN}
            if self.inspection.patterns:
                values |= self._patterns(plan, B, H, Tq, Tk, first)
            if self.views is not None and real is not None:
                self.views.refuse()
            elif self.views is not None:
                self.views.add(self.names.get(id(module), type(module).__name__), call, plan)
            if "first_key_mass" in statistics:
                seen = self._sees_first(call, first, positions, Tk)
                values["first_key_mass"] = torch.where(seen, values["first_key_mass"], torch.nan)
            valid = aux.max_scores > -torch.inf
            if real is not None:
                valid = valid & real[:, None]
            layer = self._layer(module, H)
            layer.add(values, valid, position_bins(positions))
            if "key_mass" in statistics:
                mass = aux.key_mass
                if mass is None:  # again, without the queries that are padding
                    assert real is not None
                    readers = Documents(real.long() - 1, torch.zeros(Tk, dtype=torch.long, device=real.device))
                    call["problem"] = _narrowed(problem, readers)
                    mass = attention(**call, return_aux=AuxRequest(key_mass=True))[1].key_mass
                assert mass is not None and by_key is not None
                layer.add_keys(mass, by_key, position_bins(key_positions))
        return out

    def _patterns(
        self, plan: dict[str, Any], B: int, H: int, Tq: int, Tk: int, first: Tensor | None
    ) -> dict[str, Tensor]:
        """Weights [B, H, Tq] on chosen keys, exactly; NaN where a query has no such key."""
        query = plan["query"]
        none = torch.full((B, H, Tq), torch.nan, dtype=torch.float32, device=query.device)
        two = bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))
        if Tq != Tk or two:  # a cache, or perhaps the keys of another sequence
            return dict.fromkeys(PATTERNS, none)
        own = torch.arange(Tq, device=query.device)
        begins = own[None] == (torch.zeros_like(own)[None] if first is None else first.to(own.device))  # [B|1, Tq]
        near = weights_at(index=torch.stack([own, (own - 1).clamp(min=0)], -1), **plan).float()
        previous = torch.where(begins[:, None], torch.nan, near[..., 1])
        induction = self._induction(plan, none, begins)
        return {"self_token": near[..., 0], "previous_token": previous, "induction": induction}

    def _induction(self, plan: dict[str, Any], none: Tensor, begins: Tensor) -> Tensor:
        """Mass on the keys that follow an earlier copy of the query's token: by token, a packing of its own."""
        ids = self.arguments.get("input_ids")
        problem = plan["problem"] or Transport()
        rows = isinstance(problem.marginal, Rows) and problem.marginal.relax is None and problem.marginal.mass == 1
        if (
            not isinstance(ids, Tensor)
            or ids.shape != none.shape[::2]
            or not isinstance(problem.regularizer, KL)
            or not rows
        ):
            return none
        ids = ids.to(none.device)
        before = torch.where(begins, -1, ids.roll(1, 1))  # the token before each key, in its own sequence
        copies = _narrowed(problem, Documents(ids, before))
        value = plan["key"][..., :1]
        request = AuxRequest(lse=True)
        whole = attention(**plan, value=value, return_aux=request)[1].lse
        # Only keys up to the query's own: what follows a later copy is not induction.
        past = Transport(copies.regularizer, prior=_past(copies.prior), marginal=Rows(), temperature=copies.temperature)
        narrowed: dict[str, Any] = {**plan, "problem": past}
        chosen = attention(**narrowed, value=value, return_aux=request)[1].lse
        assert whole is not None and chosen is not None
        return torch.where(chosen > -torch.inf, (chosen - whole).exp(), torch.nan)

    def _sees_first(self, call: dict[str, Any], first: Tensor | None, positions: Tensor, Tk: int) -> Tensor:
        """Which queries may read the first key of their sequence (broadcasts to [B, H, Tq]): not those that a window
        keeps from it, nor those whose cache has dropped it."""
        kept = (positions < Tk)[:, None].to(call["query"].device)
        if first is not None:
            return kept
        form = lower(**call)
        B, H, Tq, _ = form.shape
        mask = form.cut(slice(0, B), slice(0, H), slice(0, Tq), slice(0, 1)).admissible(Tq, 1, kept.device)
        return kept if mask is None else kept & mask.expand(*mask.shape[:-1], 1).squeeze(-1)

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

    def _positions(
        self, module: nn.Module, B: int, Tq: int, Tk: int, position_ids: object
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """Which queries are not padding ([B, Tq]; None: all), where queries and keys stand in their sequence
        ([B|1, T]), and the key at which each query's sequence begins ([B|1, Tq]; None: key 0)."""
        decoder = "decoder" in self.names.get(id(module), "").split(".")
        both = bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))
        prefix = "decoder_" if both and decoder else ""
        mask, tokens = self.arguments.get(f"{prefix}attention_mask"), self.arguments.get(f"{prefix}input_ids")
        if tokens is None:
            tokens = self.arguments.get(f"{prefix}inputs_embeds")
        keys = torch.arange(Tk)[None]
        if (
            isinstance(mask, Tensor)
            and isinstance(tokens, Tensor)
            and mask.dim() == 2
            and tokens.shape[1] == Tq <= mask.shape[1]
            and mask.shape[0] == B
            and not bool(mask.bool().all())
        ):
            mask = mask.bool()
            standing = (mask.cumsum(-1) - 1).clamp(min=0).cpu()
            if mask.shape[1] != Tk or (both and decoder):  # other keys than the mask's
                return mask[:, -Tq:], standing[:, -Tq:], keys, None
            first = mask.long().argmax(-1, keepdim=True).expand(B, Tq)
            return mask[:, -Tq:], standing[:, -Tq:], standing, first if bool(first.any()) else None
        if isinstance(position_ids, Tensor) and position_ids.dim() == 2 and position_ids.shape[1] == Tq:
            positions = position_ids.cpu()
            first = torch.arange(Tq) - positions
            packed = Tq == Tk and not both and bool((first != 0).any()) and bool((first >= 0).all())
            return None, positions, positions if packed else keys, first if packed else None
        begin = Tk - Tq if Tk > Tq and getattr(module, "is_causal", False) else 0
        return None, torch.arange(begin, begin + Tq)[None], keys, None


_PLAN = ("query", "key", "attn_mask", "scale", "enable_gqa", "problem", "softcap")  # what makes a plan


def _configs(model: nn.Module) -> list[Any]:
    """The model's configurations that name an attention implementation, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            waiting += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    return list(found.values())


def _narrowed(problem: Transport, prior: Documents) -> Transport:
    prior_ = prior if problem.prior is None else problem.prior * prior
    return Transport(problem.regularizer, prior=prior_, marginal=problem.marginal, temperature=problem.temperature)


def _past(prior: Prior | None) -> Prior:
    """The prior without keys after the query's own (Tq = Tk)."""
    causal = Window(None, 0)
    return causal if prior is None else prior * causal


def _admissible(call: dict[str, Any], real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys that each query may read [B, H|1, Tq], and (real) queries that may read each key [B, H|1, Tk]."""
    form = lower(**call)
    B, H, Tq, Tk = form.shape
    device = call["query"].device
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
