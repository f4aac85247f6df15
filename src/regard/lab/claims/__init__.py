"""Every checkable sentence and printed number of the five documents from which regard started, judged by computation.

To add a claim, add one function to the file of its document, `document_NNN*.py`; its name becomes the claim's name:

    @says("002", "Introduction", "equal scores give uniform weights")
    def equal_scores_are_uniform() -> CheckResult:
        p = weights(tensor(1, 1, 1, 1))
        return judged(f"Four equal scores give {show(p, 2)}.", agree(p, torch.full_like(p, 0.25)))

`@prints` is for printed numbers, `untestable` for sentences that no computation can decide (`claim.py`). Then write the
page again: `regard lab claims --markdown > docs/claims.md`. A new document is one file and its lines in `table.py`.
"""

from .claim import VERDICTS as VERDICTS
from .claim import Claim as Claim
from .table import CLAIMS as CLAIMS
from .table import DOCUMENTS as DOCUMENTS
from .table import MODULES as MODULES
from .table import ClaimRow as ClaimRow
from .table import counts as counts
from .table import judge_claim as judge_claim
from .table import judge_claims as judge_claims
from .table import summary as summary
from .table import to_json as to_json
from .table import to_markdown as to_markdown
