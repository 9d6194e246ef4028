"""Libraries that not every installation has: what to install where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtra(ImportError):
    """A library of an extra cannot be imported; the message says what to install."""


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Wraps the imports of what the extra `name` installs. what: the subject of the message, which needs them. If two
    are nested, the outer one is named. Raises MissingExtra."""
    try:
        yield
    except ImportError as error:
        cause = error.__cause__ if isinstance(error, MissingExtra) else error
        said = f"{what} needs more than is installed ({cause})"
        raise MissingExtra(f"{said}: pip install 'rubato-llm[{name}]'") from cause
