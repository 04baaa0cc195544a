"""Whether a scaler makes the step of an optimizer that PyTorch's hooks tell of."""

from __future__ import annotations

import inspect
import sys
from types import FrameType

from halfstep._scaler.torch_calls import TorchCalls

_STEP = inspect.unwrap(TorchCalls.step).__code__


def is_by_scaler() -> bool:
    """Say whether the step of an optimizer that runs in this thread is one of a scaler of ours.

    A stage of a pipeline scales no loss: nothing else tells its steps from plain ones.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP:
            return True
        frame = frame.f_back
    return False
