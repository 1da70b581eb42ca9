"""Configurations, plans and statistics for people (text tables, plots, web pages) and for programs (JSON)."""

from tpuemb_torch.report.description import describe
from tpuemb_torch.report.plans import describe_plan, plan_page, plot_plan, print_plan
from tpuemb_torch.report.plots import plot_stats, save_png, to_svg
from tpuemb_torch.report.program import program_formula
from tpuemb_torch.report.statistics import print_stats, stats_page
from tpuemb_torch.report.tables import print_config

__all__ = [
    "describe",
    "describe_plan",
    "plan_page",
    "plot_plan",
    "plot_stats",
    "print_config",
    "print_plan",
    "print_stats",
    "program_formula",
    "save_png",
    "stats_page",
    "to_svg",
]
