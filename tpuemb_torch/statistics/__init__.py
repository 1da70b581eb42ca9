"""Statistics of a layer's input: what was looked up, how often, and how it spreads over shards.

The values and their file need no torch; the counting (`recorder`) does, and is imported by those who count.
"""

from tpuemb_torch.statistics.errors import StatsError
from tpuemb_torch.statistics.files import STATS_FILE, read_stats, save_stats
from tpuemb_torch.statistics.values import PartitionLimits, Stats, TableStats, merge_tables

__all__ = [
    "STATS_FILE",
    "PartitionLimits",
    "Stats",
    "StatsError",
    "TableStats",
    "merge_tables",
    "read_stats",
    "save_stats",
]
