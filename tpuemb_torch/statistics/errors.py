"""The one error of a statistics file."""

from __future__ import annotations


class StatsError(ValueError):
    """A statistics file that is missing, or that holds what cannot be.

    Attributes:
        field: the file, and the place in it (`/profiles/stats.json: tables[2].ids`).
        problem: the value, its limit, and what to do.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type[StatsError], tuple[str, str]]:  # errors travel between processes
        return (type(self), (self.field, self.problem))
