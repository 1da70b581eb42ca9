"""Descriptions of a configuration for people (text tables) and for programs (JSON)."""

from tpuemb_torch.report.description import describe
from tpuemb_torch.report.program import program_formula
from tpuemb_torch.report.tables import print_config

__all__ = ["describe", "print_config", "program_formula"]
