"""Placeholder until the version checks are written."""


def require_torchrec() -> None:
    """Does nothing yet."""
