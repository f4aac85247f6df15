"""`attention` called from compiled code where it must run in eager mode. Imported there only: it needs Dynamo."""

from typing import Any

import torch

from .operator import attention

attend: Any = torch.compiler.disable(attention, reason="RowsAndColumns: the number of passes depends on the data")
