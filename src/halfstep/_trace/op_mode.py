"""A dispatch mode that is called for every op that computes, and for none made of others."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from halfstep._autocast import scopes
from halfstep._autocast.casts import tensors_in
from halfstep._pytorch import amp, compiler, dispatch, modes
from halfstep._trace.ops import device_of, op_name
from halfstep._trace.places import Places
from halfstep._trace.rows import dtype_name
from halfstep._trace.tensors import is_dense


class _Thread(threading.local):
    """Whether a kernel of autocast has cast the arguments of what is taken apart."""

    is_cast = False


class OpMode(modes.DispatchMode):  # type: ignore[no-untyped-call]
    """Calls :meth:`run` for every op.

    Args:
        places: Knows which rule decides for what runs.
    """

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places
        self._taking_apart = _Thread()

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        """Run an op and return its result.

        Args:
            func: The op.
            args: Its arguments.
            kwargs: Its keyword arguments.
            given: The tensors among both.
        """
        raise NotImplementedError

    @compiler.keep_out_of_graphs
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op."""
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        device = device_of(given, kwargs)
        if dispatch.is_made_of_others(func, device) and all(map(is_dense, given)):
            return self._take_apart(func, device, args, kwargs)
        return self.run(func, args, kwargs, given)

    def _take_apart(
        self, func: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a composite as its parts: in inference mode nothing above this mode does so.

        Autocast, off in a mode, is on for the parts unless a kernel of it has cast for them all.
        """
        here, before = self._taking_apart, self._taking_apart.is_cast
        here.is_cast = before or self._is_cast_by_autocast(func, device)
        is_on = not here.is_cast and autocast_of_caller(device)[0] is not None
        try:
            with modes.autocast_again(device) if is_on else nullcontext(), self:
                return dispatch.decompose(func, args, kwargs)
        finally:
            here.is_cast = before

    def _is_cast_by_autocast(self, func: Any, device: str) -> bool:
        if device in scopes.current().policies:
            ruled = self._places.ruled
            return bool(ruled) and ruled[-1].rule.action != "leave"
        name = f"{op_name(func)}.{dispatch.overload_of(func)}"
        return name in dispatch.overloads_with_autocast_kernel(device)


def autocast_of_caller(device: str) -> tuple[str | None, bool]:
    """In a mode: return the lower precision, None where autocast is off, and if casts are kept."""
    if device not in amp.autocast_devices():
        return None, False
    switches = modes.autocast_switches_of_caller(device)
    return (dtype_name(switches.dtype) if switches.enabled else None), switches.cache
