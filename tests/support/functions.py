"""Functions and parts outside of regard, as a user has them in a module: for the tests of problems as JSON."""

import torch

from regard.priors import PlanShape, Prior, PriorTerms


def half_square(x):
    return (x - 1) ** 2 / 2


def one_more(t):
    return 1 + t


SLOPES = torch.linspace(0.1, 0.4, 4)


def near(b, h, i, j):
    return -SLOPES[h] * (i - j).abs()


def recent(b, h, q, k):
    return q - k < 9


class Recent(Prior):
    """Keys of the last `steps` positions."""

    positioned = True
    steps: int
    alignment: str | None = None

    def terms(self, shape: PlanShape) -> PriorTerms:
        return PriorTerms(left=self.steps, right=0)


NUMBER = 3
