"""halfstep inside the frameworks that train: a module for each that needs one.

``lightning``, ``accelerate``, ``transformers``, ``timm``, ``ultralytics`` and ``fastai``. Each
imports its framework, and halfstep imports none of them by itself. docs/integrations.md says what
each does, and what to write for frameworks that need no module.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(framework: str) -> Iterator[None]:
    """Import a framework in this block; one that is missing is an error with the cure."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"halfstep.integrations.{framework} needs the package {error.name}, which is not "
            f"installed; install it with: pip install 'halfstep[{framework}]'",
            name=error.name,
        ) from error
