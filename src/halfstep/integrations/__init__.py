"""Integrations with training frameworks: one module for each framework that needs one.

Each imports its framework; halfstep itself imports none of them. docs/integrations.md explains
each, and what to write for frameworks that need no module.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(framework: str) -> Iterator[None]:
    """Import a framework in this block; the error for a missing one says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"halfstep.integrations.{framework} needs the package {error.name}, which is not "
            f"installed; install it with: pip install 'halfstep[{framework}]'",
            name=error.name,
        ) from error
