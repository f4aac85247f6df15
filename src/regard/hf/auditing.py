"""`audit`: does a model compute the attention that its layers ask for, under each implementation?

Each scenario (padding, packing, generation with a cache) runs three times. First with the definition: every attention
call of the model is solved in float64, with the mask that regard's own mask function made. Then with the
implementation, layer by layer: each call gets the inputs of the first run, its output is compared, and the definition's
output is passed on, so that a mistake of one layer does not reach the next. Last with the implementation alone, for the
change of the logits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface
from transformers.utils.import_utils import is_optimum_quanto_available

from .._validate import describe
from ..auditing.calls import Call, solve_exactly
from ..auditing.report import Audit, Finding, Refusal
from ..auditing.single_calls import compared_rows, explain, in_dtype, judge
from ..priors import Documents
from ..problem import Transport
from .inputs import batches, evaluation_mode
from .interception import AttentionCall, Interception
from .models import check
from .registry import is_registered
from .small_models import small_model

NEW_TOKENS = 4
Progress = Callable[[str, int, int], None]
_ARGUMENTS = {  # of the attention function, by the finding that says that it had no effect
    "sink-dropped": "s_aux",
    "softcap-dropped": "softcap",
    "window-dropped": "sliding_window",
    "mask-dropped": "attention_mask",
    "causal-dropped": "attention_mask",
    "documents-dropped": "attention_mask",
    "bias-dropped": "position_bias",
    "relative-dropped": "position_bias",
    "scale-ignored": "scaling",
}


@dataclass(frozen=True)
class LayerFinding(Finding):
    """A mistake of one implementation."""

    implementation: str = ""
    layer: str = ""  # the first layer that shows it
    layers: int = 0  # how many show it
    argument: str = ""  # of the attention function, that had no effect
    harm: float = math.nan  # largest change of a logit (or of the last hidden state)


@dataclass
class _Recorded:
    """One attention call of the run with the definition."""

    module: nn.Module
    name: str
    call: Call  # float64
    out: Tensor  # [B, H, Tq, Dv]
    rows: Tensor  # [B, H, Tq]


@dataclass
class _Wrong:
    """A call whose output the implementation computed wrongly."""

    layer: str
    scenario: str
    recorded: _Recorded
    got: Tensor
    error: float
    allowed: float
    dtype: torch.dtype


@dataclass
class _Scenario:
    name: str
    arguments: dict[str, Any]
    generates: bool = False
    cache: str | None = None


@dataclass
class _Definition:
    """The listener of the first run."""

    recorded: list[_Recorded] = field(default_factory=list)

    def model_called(self) -> None:
        pass

    def model_returned(self) -> None:
        pass

    def attend(self, call: AttentionCall) -> Tensor:
        given = call.arguments
        exact = in_dtype(
            Call(
                given["query"],
                given["key"],
                given["value"],
                given["problem"] or Transport(),
                given["attn_mask"],
                given["scale"],
                given["softcap"],
            ),
            torch.float64,
        )
        out = solve_exactly(exact)[0]
        real = None if call.place.real is None else call.place.real.to(out.device)
        self.recorded.append(_Recorded(call.module, call.name, exact, out, compared_rows(exact, real)))
        return out.to(given["query"].dtype)


def audit(
    model: Any,
    implementations: Sequence[str] = ("sdpa", "eager"),
    inputs: Any = None,
    *,
    seed: int = 0,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Audit:
    """Compare every attention layer of a transformers model, under each implementation, with the definition.

    `model` is a model, or a configuration, of which a small model with random weights is made. `implementations` are
    names that `attn_implementation` accepts, of transformers, of yours, or registered by `regard.hf.register`. Without
    `inputs` the model reads random tokens: plainly, padded on either side, packed, and through `generate` with each
    kind of cache that is possible there. `inputs` is what the model is called with instead (token ids, or a dict).

    A finding names the implementation, the first layer, the argument without effect and the change of the logits.
    `allow` names findings that are known and do not count.
    """
    if isinstance(implementations, str) or not implementations:
        raise TypeError(f"implementations: expected names, got {describe(implementations)}")
    if isinstance(model, transformers.PreTrainedConfig):
        model = small_model(model, seed)
    check(model)
    scenarios = _scenarios(model, inputs, seed)
    before = model.config._attn_implementation
    run = _ModelAudit(model)
    try:
        steps = [(name, scenario) for name in implementations if run.accepts(name) for scenario in scenarios]
        with evaluation_mode(model), torch.random.fork_rng(devices=[]):
            for number, (name, scenario) in enumerate(steps):
                if progress is not None:
                    progress(f"{name}: {scenario.name}", number, len(steps))
                torch.manual_seed(seed)
                run.scenario(name, scenario)
    finally:
        model.set_attn_implementation(before)
    findings = [dataclasses.replace(finding, accepted=finding.name in allow) for finding in run.findings()]
    if not run.ran:
        first = f"; the first: {run.refusals[0]}" if run.refusals else ""
        findings.append(Finding("nothing-ran", "error", f"no scenario ran, so nothing was audited{first}", ()))
    parameter = next(model.parameters())
    return Audit(
        function=f"{type(model).__name__} under {', '.join(implementations)}",
        problem="each layer's own call",
        convention="transformers",
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=str(parameter.device),
        seed=seed,
        gradients=False,
        cases=tuple(run.ran),
        findings=tuple(findings),
        refusals=tuple(run.refusals),
    )


class _ModelAudit:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.ran: list[str] = []
        self.refusals: list[Refusal] = []
        self.wrong: dict[str, list[_Wrong]] = {}  # by implementation
        self.harm: dict[tuple[str, str], float] = {}  # by implementation and scenario

    def accepts(self, implementation: str) -> bool:
        """Whether the model can have this implementation; if not, this is a refusal."""
        try:
            self._set(implementation)
        except Exception as error:  # of transformers: not installed, not supported, not known
            self.refusals.append(Refusal(implementation, _said(error)))
            return False
        return True

    def scenario(self, implementation: str, scenario: _Scenario) -> None:
        label = f"{implementation}: {scenario.name}"
        try:
            self._set(implementation if is_registered(implementation) else "eager")
            listener = _Definition()
            with Interception(self.model, listener).attached():
                expected = self._run(scenario)
            self._set(implementation)
            watch = _Watch(listener.recorded, scenario.name)
            with watch.attached():
                self._run(scenario)
            if watch.count != len(listener.recorded):
                raise RuntimeError(
                    f"the model made {watch.count} attention calls, and {len(listener.recorded)} with the definition"
                )
            alone = self._run(scenario)
        except Exception as error:  # an implementation may refuse a model or an input by any exception
            self.refusals.append(Refusal(label, _said(error)))
            return
        self.ran.append(label)
        self.wrong.setdefault(implementation, []).extend(watch.wrong)
        self.harm[implementation, scenario.name] = _difference(alone, expected, scenario)

    def _set(self, implementation: str) -> None:
        self.model.set_attn_implementation(implementation)

    def _run(self, scenario: _Scenario) -> Tensor:
        """The logits of the scenario: [B, T, V], or one row for each new token."""
        if not scenario.generates:
            found = self.model(**scenario.arguments)
            out = getattr(found, "logits", None)
            return (found.last_hidden_state if out is None else out).detach()
        more: dict[str, Any] = {} if scenario.cache is None else {"cache_implementation": scenario.cache}
        found = self.model.generate(
            **scenario.arguments,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
            disable_compile=True,
            **more,
        )
        return torch.stack(found.logits, 1)

    def findings(self) -> list[Finding]:
        found: list[Finding] = []
        for implementation, wrong in self.wrong.items():
            explained = [(one, _names(one)) for one in wrong]
            while explained:
                counts: dict[str, int] = {}
                for _, names in explained:
                    for name, _ in names:
                        counts[name] = counts.get(name, 0) + 1
                best = max(counts, key=lambda name: counts[name])
                mine = [(one, dict(names)[best]) for one, names in explained if best in dict(names)]
                found.append(self._finding(implementation, best, mine))
                # What needs two mistakes shows the other one, too.
                explained = [
                    (one, [(name, text) for name, text in names if name != best])
                    for one, names in explained
                    if best not in dict(names) or _is_pair(names)
                ]
                explained = [(one, names) for one, names in explained if names]
        return found

    def _finding(self, implementation: str, name: str, mine: list[tuple[_Wrong, str]]) -> Finding:
        scenarios = list(dict.fromkeys(one.scenario for one, _ in mine))
        layers = list(dict.fromkeys(one.layer for one, _ in mine))
        first, sentence = mine[0]
        worst = max((one for one, _ in mine), key=lambda one: one.error)
        harm = max(self.harm.get((implementation, scenario), math.nan) for scenario in scenarios)
        argument = _ARGUMENTS.get(name, "")
        message = f"{implementation}: {sentence}, from {first.layer}"
        message += f" on ({len(layers)} layers)" if len(layers) > 1 else ""
        message += f"; the argument {argument} has no effect" if argument else ""
        message += f"; logits change by up to {harm:.2g}" if math.isfinite(harm) else ""
        return LayerFinding(
            name=name,
            severity="error",
            message=message,
            cases=tuple(f"{implementation}: {scenario}" for scenario in scenarios),
            part=f"output of {worst.layer}",
            error=worst.error,
            allowed=worst.allowed,
            implementation=implementation,
            layer=first.layer,
            layers=len(layers),
            argument=argument,
            harm=harm,
        )


class _Watch:
    """While attached, compares each attention call of the model with the recorded ones, in order."""

    def __init__(self, recorded: list[_Recorded], scenario: str) -> None:
        self.recorded, self.scenario = recorded, scenario
        self.count = 0
        self.wrong: list[_Wrong] = []

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        original = AttentionInterface.get_interface

        def get_interface(interface: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
            return self._watched(original(interface, name, default))

        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]
        try:
            yield
        finally:
            AttentionInterface.get_interface = original  # type: ignore[method-assign]

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = function(module, query, *args, **kwargs)
            number, self.count = self.count, self.count + 1
            if number >= len(self.recorded) or self.recorded[number].module is not module:
                raise RuntimeError("the model calls its attentions in another order than with the definition")
            known = self.recorded[number]
            got = found[0].transpose(1, 2)
            verdict = judge(known.call, known.out, got, query.dtype, known.rows)
            if not verdict.right:
                self.wrong.append(
                    _Wrong(known.name, self.scenario, known, got.detach(), verdict.error, verdict.allowed, query.dtype)
                )
            return (known.out.to(query.dtype).transpose(1, 2).contiguous(), *found[1:])

        return watched


def _said(error: BaseException) -> str:
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text if len(text) < 160 else text[:157] + '...'}"


def _names(wrong: _Wrong) -> list[tuple[str, str]]:
    """The diagnoses of one wrong call."""
    known = wrong.recorded
    found = explain(known.call, wrong.got, wrong.dtype, known.rows, wrong.allowed)
    padding = any(
        isinstance(f, Documents) and f.key_ids is not None and not bool(f.query_ids.any()) for f in known.call.factors
    )
    if padding:  # regard's masks describe padding as a document
        found = [
            ("mask-dropped", "padding is read") if name == "documents-dropped" else (name, text) for name, text in found
        ]
    return found or [("wrong-output", "the output is wrong, and no single known mistake explains it")]


def _is_pair(names: list[tuple[str, str]]) -> bool:
    return len(names) == 2 and all("together with" in text for _, text in names)


def _difference(found: Tensor, expected: Tensor, scenario: _Scenario) -> float:
    """The largest difference of logits of real tokens, up to the first generated token that differs."""
    error = (found.double() - expected.double()).abs()
    mask = scenario.arguments.get("attention_mask")
    if scenario.generates:
        same = (found.argmax(-1) == expected.argmax(-1)).long().cumprod(1)
        error = error * torch.nn.functional.pad(same, (1, 0), value=1)[:, :-1, None]
    elif isinstance(mask, Tensor) and error.dim() == 3 and mask.shape == error.shape[:2]:
        error = error[mask.bool()]
    return float(error.nan_to_num(math.inf).max())


def caches(device: torch.device) -> list[str]:
    """The kinds of caches that `generate` can have here. Offloading needs an accelerator, quantization a package."""
    offloaded = ["offloaded", "offloaded_static"] if device.type != "cpu" else []
    return ["dynamic", "static", *offloaded, *(["quantized"] if is_optimum_quanto_available() else [])]


# --- inputs -----------------------------------------------------------------------------------------------------------


def _scenarios(model: Any, inputs: Any, seed: int) -> list[_Scenario]:
    device = next(model.parameters()).device
    if inputs is not None:
        found = []
        for number, batch in enumerate(batches(inputs)):
            moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
            found.append(_Scenario(f"your inputs{f' {number + 1}' if number else ''}", moved))
        return found
    config = model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else model.config
    words = getattr(config, "vocab_size", None)
    if getattr(model, "main_input_name", "input_ids") != "input_ids" or words is None:
        raise ValueError(
            f"inputs: expected the arguments of {type(model).__name__}, which does not read tokens alone, got None"
        )
    window = getattr(config, "sliding_window", None)
    length = min(window + 8, 160) if isinstance(window, int) else 24
    longest = getattr(config, "max_position_embeddings", None)
    length = max(8, min(length, (longest or length + NEW_TOKENS) - NEW_TOKENS))
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, max(4, words), (2, length), generator=draw).to(device)
    padded = max(2, length // 4)
    right, left = torch.ones_like(ids), torch.ones_like(ids)
    right[0, length - padded :] = 0
    left[0, :padded] = 0
    both: dict[str, Any] = {}
    if getattr(model.config, "is_encoder_decoder", False):
        both = {"decoder_input_ids": ids[:, : length // 2].clone()}
    found = [
        _Scenario("plain", {"input_ids": ids, **both}),
        _Scenario("right padding", {"input_ids": ids, "attention_mask": right, **both}),
        _Scenario("left padding", {"input_ids": ids, "attention_mask": left, **both}),
    ]
    generates = model.can_generate() if hasattr(model, "can_generate") else False
    if generates and not both:
        half = length // 2
        positions = torch.cat([torch.arange(half), torch.arange(length - half)])[None].to(device)
        found.append(_Scenario("packed", {"input_ids": ids[:1], "position_ids": positions, "use_cache": False}))
    if generates:
        prompt = {"input_ids": ids, "attention_mask": left}
        for kind in caches(device):
            cache = None if kind == "dynamic" else kind  # the default of `generate`
            found.append(_Scenario(f"generate, {kind} cache", prompt, generates=True, cache=cache))
    return found
