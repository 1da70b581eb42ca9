"""The one error that a wrong configuration raises, and the warning for one that is legal but suspicious."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot be read, or that breaks a rule.

    Attributes:
        field: where, by proto names (`table_descriptor[2].optimization_parameters.adam.beta1`); for a source that
            cannot be parsed, its name, with the line and column or the byte where parsing stopped.
        problem: the value, its limit, and what to do.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:  # errors travel between processes
        return (type(self), (self.field, self.problem))


class ConfigWarning(UserWarning):
    """A legal configuration that probably does not mean what it says."""
