"""Turns a missing optional library into an error that names the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtra(ImportError):
    """A library of an extra cannot be imported; the message says what to install."""


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Wraps imports: where one fails, raises MissingExtra, which says that `what` needs the extra `name`. Of two nested
    extras it names the outer one.
    """
    try:
        yield
    except ImportError as error:
        cause = error.__cause__ if isinstance(error, MissingExtra) else error
        said = f"{what} needs more than is installed ({cause})"
        raise MissingExtra(f"{said}: pip install 'rubato-llm[{name}]'") from cause
