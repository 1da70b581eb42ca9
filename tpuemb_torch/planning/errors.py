"""The one error of a plan."""

from __future__ import annotations


class PlanError(ValueError):
    """A plan that cannot be made, built or read.

    Attributes:
        field: the argument, or the file and the place in it (`plan.yaml: tables.user.sharding`).
        problem: the value, its limit, and what to do.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type[PlanError], tuple[str, str]]:  # errors travel between processes
        return (type(self), (self.field, self.problem))
