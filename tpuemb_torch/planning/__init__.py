"""Which rank holds what: plans made on paper, their arithmetic, and their files.

Nothing here imports torchrec, needs a process group or allocates a table; torch is imported by `make_plan` alone.
"""

from tpuemb_torch.planning.errors import PlanError
from tpuemb_torch.planning.files import read_plan, save_plan
from tpuemb_torch.planning.plan import EXCHANGES, SHARDINGS, Exchange, Plan, PlannedTable, RankUsage, TablePlan
from tpuemb_torch.planning.planner import make_plan
from tpuemb_torch.planning.rules import refusal
from tpuemb_torch.planning.sizes import format_bytes, parse_bytes

__all__ = [
    "EXCHANGES",
    "SHARDINGS",
    "Exchange",
    "Plan",
    "PlanError",
    "PlannedTable",
    "RankUsage",
    "TablePlan",
    "format_bytes",
    "make_plan",
    "parse_bytes",
    "read_plan",
    "refusal",
    "save_plan",
]
