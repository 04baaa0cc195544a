"""Warnings that name the line of the user's code."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from halfstep.errors import HalfstepWarning

_NOT_THE_USERS = ("halfstep.", "torch.")


def warn(text: str, category: type[Warning] = HalfstepWarning) -> None:
    """Issue a warning at the innermost running line outside of halfstep and PyTorch.

    Between that line and the caller may be functions of PyTorch, such as that of a scheduler around
    ``optimizer.step``. Besides, accelerate hides warnings from PyTorch's modules.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
