"""`attention` called from compiled code where it must run in eager mode. Imported there only: it needs Dynamo."""

import torch

from .operator import attention

attend = torch.compiler.disable(attention, reason="RowsAndColumns: the number of passes depends on the data")
