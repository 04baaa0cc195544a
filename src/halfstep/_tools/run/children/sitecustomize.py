"""The hook that every Python process of a `halfstep run` finds when it starts.

The folder of this file is first in ``PYTHONPATH`` there, so Python imports this one and not the
environment's own ``sitecustomize``, which is imported from here. Nothing but this file is loaded
until the process imports PyTorch or halfstep.
"""

import os
import sys


class _Finder:
    """An import finder that begins the recording once the first of the two modules is loaded."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in ("torch", "halfstep") or "HALFSTEP_RUN" not in os.environ:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def execute_and_begin(module):  # type: ignore[no-untyped-def]
            del loader.exec_module
            execute(module)
            try:
                from halfstep._tools.run.session import begin_in_child
            except ImportError:  # an interpreter without halfstep
                return
            begin_in_child()

        loader.exec_module = execute_and_begin  # type: ignore[method-assign]
        return spec


def _import_hidden() -> None:
    """Import the ``sitecustomize`` that would have been found without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    ours = sys.modules.pop(__name__)
    try:
        __import__("sitecustomize")  # the next one on sys.path
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules[__name__] = ours


if "HALFSTEP_RUN" in os.environ:
    sys.meta_path.insert(0, _Finder())
_import_hidden()
