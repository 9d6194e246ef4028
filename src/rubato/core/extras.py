"""Libraries that not every installation has: what to install where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtra(ImportError):
    """A library of an extra cannot be imported; the message says what to install."""


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Put around imports: where one fails, MissingExtra is raised, saying that `what` needs the extra `name`. Of two
    nested ones the outer is named."""
    try:
        yield
    except ImportError as error:
        cause = error.__cause__ if isinstance(error, MissingExtra) else error
        said = f"{what} needs more than is installed ({cause})"
        raise MissingExtra(f"{said}: pip install 'rubato-llm[{name}]'") from cause
