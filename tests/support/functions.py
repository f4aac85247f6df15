"""Functions and parts outside of regard, as a user has them in a module: for the tests of problems as JSON."""

from regard.priors import PlanShape, Prior, PriorTerms


def half_square(x):
    return (x - 1) ** 2 / 2


def one_more(t):
    return 1 + t


class Recent(Prior):
    """Keys of the last `steps` positions."""

    positioned = True
    steps: int
    alignment: str | None = None

    def terms(self, shape: PlanShape) -> PriorTerms:
        return PriorTerms(left=self.steps, right=0)


NUMBER = 3
