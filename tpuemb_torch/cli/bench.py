"""`tpuemb bench`"""

from __future__ import annotations

from tpuemb_torch.benchmarks.main import bench

__all__ = ["bench"]
