"""`attention` outside of a compiled graph, for problems whose number of passes or of tiles depends on the data.

Imported only while compiling: it needs Dynamo, which takes seconds to load.
"""

from typing import Any

import torch

from .dispatch import attend

attend_eagerly: Any = torch.compiler.disable(
    attend,
    reason="regard.attention runs outside of the graph: under RowsAndColumns the number of passes depends on the data, "
    "and for a union, Prefix or Blocks of this length the number of mixed tiles does",
)
