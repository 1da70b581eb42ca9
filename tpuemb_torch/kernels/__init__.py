"""Table-batched lookup and fused update."""

from tpuemb_torch.kernels.group import FusedLookup, TableGroup, group_key
from tpuemb_torch.kernels.step_inputs import StepInputs, StepSource
from tpuemb_torch.kernels.table_batched import KERNELS, TableBatchedEmbedding, check_kernel, group_runs
from tpuemb_torch.kernels.tables import StoredPart, TablePart

__all__ = [
    "KERNELS",
    "FusedLookup",
    "StepInputs",
    "StepSource",
    "StoredPart",
    "TableBatchedEmbedding",
    "TableGroup",
    "TablePart",
    "check_kernel",
    "group_key",
    "group_runs",
]
