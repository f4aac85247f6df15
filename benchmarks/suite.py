"""The cases, quick and full, and their targets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from contest import WINDOW, Case

ALL = ("SDPA", "FlexAttention", "eager", "x-transformers")


@dataclass(frozen=True)
class Entry:
    """A case, and by which factor regard is to be faster than each peer."""

    case: Case
    targets: dict[str, float] = field(default_factory=dict)
    memory: bool = False  # also measure peak memory
    sparse: dict[str, float] = field(default_factory=dict)  # the targets if the density is below 5 %


def _heads(T: int) -> int:
    """Fewer heads for long sequences, to limit the time."""
    return 8 if T <= 8192 else 2 if T <= 16384 else 1


def softmax(full: bool) -> list[Entry]:
    entries = []
    for train in (False, True):
        name = "softmax, training" if train else "softmax, forward"
        lengths = [2**n for n in range(7, 17)] if full else [1024, 4096]
        for T in lengths:
            for kind in ("full", "causal"):
                # For longer sequences one call of FlexAttention takes 10 s or more (docs/speed/results.csv, T = 8192).
                peers = ALL if (full and T <= 4096) or T == 1024 else ("SDPA",)
                case = Case(name, T, H=_heads(T), kind=kind, train=train, telemetry=True, peers=peers)
                judged = 1024 <= T <= 4096
                goal = {"full": 1.25, "causal": 1.5}[kind] if train else {"full": 1.3, "causal": 1.6}[kind]
                entries.append(Entry(case, {"SDPA": goal} if judged else {}, memory=full and T >= 1024))
        for T in [1024, 2048, 4096] if full else [2048]:
            for kind, goal in {"full": 1.2, "causal": 1.3}.items():
                case = Case(name, T, D=128, kind=kind, train=train, telemetry=True)
                entries.append(Entry(case, {} if train else {"SDPA": goal}))
    return entries


def half(full: bool) -> list[Entry]:
    """Softmax in bfloat16. The goals are for processors with dot products of it (`regard doctor`: x86_64_v4_bf16)."""
    entries = []
    for train in (False, True):
        for D, lengths in ((64, [1024, 2048, 4096] if full else [1024, 4096]), (128, [2048, 4096] if full else [2048])):
            goals = {64: (1.8, 2.0), 128: (1.6, 1.8)}[D] if train else {64: (2.5, 2.7), 128: (2.2, 2.4)}[D]
            for T in lengths:
                for kind, goal in zip(("full", "causal"), goals, strict=True):
                    name = "softmax, training" if train else "softmax, forward"
                    case = Case(name, T, D=D, kind=kind, train=train, telemetry=True, half=True)
                    entries.append(Entry(case, {"SDPA": goal}))
    return entries


def sparse(full: bool) -> list[Entry]:
    entries = []
    for family in ("entmax15", "sparsemax"):
        case = Case(f"{family}, training", 4096, H=2, kind="causal", family=family, train=True, peers=("eager",))
        entries.append(Entry(case, {"eager": 60.0}, memory=full))
        # The density falls as queries grow: from all keys to a few.
        for sharpness in (0.02, 0.3, 1.0, 2.0, 4.0, 8.0) if full else (0.02, 1.0, 4.0):
            for T in [1024, 4096, 16384] if full else [4096]:
                for kind in ("full", "causal") if full else ("causal",):
                    base = Case(f"{family}, forward", T, H=_heads(T), kind=kind, family=family, sharpness=sharpness)
                    entries.append(Entry(base, {"SDPA": 1.0}, sparse={"SDPA": 2.0}))
                    training = replace(base, name=f"{family}, training", train=True)
                    entries.append(Entry(training, {}, sparse={"SDPA": 3.5}))
    return entries


def decode(full: bool) -> list[Entry]:
    entries = []
    for half in (False, True):
        for T in [4096, 8192, 16384, 32768, 65536] if full else [4096, 32768]:
            for Tq in (1, 4) if full else (1,):
                case = Case("decode", T, H=32, Hkv=8, Tq=Tq, half=half)
                judged = Tq == 1 and T <= 32768
                entries.append(Entry(case, {"SDPA": 4.0} if judged else {}))
    return entries


def window(full: bool) -> list[Entry]:
    entries = []
    for train in (False, True) if full else (False,):
        name = "window 256, training" if train else "window 256, forward"
        for T in [1024, 4096, 16384, 65536] if full else [16384]:
            peers = ("SDPA", "FlexAttention", "regard causal")
            case = Case(name, T, H=_heads(T), kind="window", train=train, peers=peers)
            judged = T == 16384 and not train
            entries.append(Entry(case, {"SDPA": 30.0, "regard causal": 15.0} if judged else {}, memory=full))
    return entries


def gpu(full: bool) -> list[Entry]:
    """For a GPU: the cases of the CPU in bfloat16, and heads of 128 up to 32768 tokens. No goals: none was measured."""
    entries = []
    lengths = [2048, 4096, 8192, 16384, 32768] if full else [2048, 8192, 32768]
    for D in (64, 128):
        for T in lengths:
            for train in (False, True):
                call = "training" if train else "forward"
                peers = ("SDPA", "FlexAttention")
                for kind in ("full", "causal"):
                    base = Case(f"softmax, {call}", T, H=16, D=D, kind=kind, train=train, half=True, peers=peers)
                    entries += [Entry(base), Entry(replace(base, name=f"{base.name}, statistics", telemetry=True))]
                window = Case(f"window {WINDOW}, {call}", T, H=16, D=D, kind="window", train=train, half=True)
                entries.append(Entry(replace(window, peers=("FlexAttention", "regard causal"))))
                for family in ("entmax15", "sparsemax"):
                    for sharpness in (0.02, 1.0, 4.0) if full else (1.0,):
                        base = Case(f"{family}, {call}", T, H=16, D=D, kind="causal", family=family, train=train)
                        sparse = replace(base, half=True, sharpness=sharpness, peers=("SDPA", "adasplash"))
                        entries.append(Entry(sparse))
        for T in lengths:
            decode = Case("decode", T, H=32, Hkv=8, Tq=1, D=D, half=True, peers=("SDPA", "FlexAttention"))
            entries.append(Entry(decode))
    return entries


def entries(full: bool) -> list[Entry]:
    return [*softmax(full), *half(full), *sparse(full), *decode(full), *window(full)]


# --- separate measurements --------------------------------------------------------------------------------------------


def telemetry(full: bool) -> list[Case]:
    """With statistics against without; the target is at most 3 % more."""
    return [
        Case("telemetry's cost", T, kind=kind, D=D, telemetry=True)
        for D in ((64, 128) if full else (64,))
        for T in ([1024, 2048, 4096] if full else [2048])
        for kind in ("full", "causal")
    ]


MEMORY = [  # one head, 65536 tokens; the target in MiB
    (Case("memory, forward", 65536, H=1, kind="causal", telemetry=True), 64.0),
    (Case("memory, training", 65536, H=1, kind="causal", telemetry=True, train=True), 128.0),
]

OVERHEAD = [  # a tiny call on one thread; with backward or not; the target in microseconds
    (Case("call", 16), False, 60.0),
    (Case("call, recorded", 16, train=True), False, 120.0),  # the forward pass alone, recorded by autograd
    (Case("call, training", 16, train=True), True, None),  # forward and backward
]
