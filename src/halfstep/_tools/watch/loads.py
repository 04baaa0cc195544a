"""Loads of batches by a DataLoader, repeated to find the line that makes inf or NaN."""

from __future__ import annotations

import copy
import io
import linecache
import re
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from types import FrameType
from typing import Any, NamedTuple

import torch

from halfstep._common.machine import RandomStates, accelerators
from halfstep._common.nested import map_leaves, tensors_in, values_reached
from halfstep._pytorch import modes
from halfstep._tools.line import Line, line_text, short_path
from halfstep._tools.measure import is_finite, is_mask
from halfstep._tools.replay.kept_calls import LARGEST_COPY
from halfstep._tools.replay.replay import OutOfTime, own_time
from halfstep._tools.user_code import Place, is_of_package, is_users
from halfstep.events import unobserved

SECONDS = 2.0  # of own time, after which the repeat of a load is given up
FIRST = "first check this line, the first with inf or NaN when the batch is loaded{}: {}"
LOADED_BY = "first check {} ({}:{}), which loads it, and what that reads"


class Load(NamedTuple):
    """Load of a batch: its data set, function, indices if known, and where the user makes it."""

    dataset: Any
    collate: Any
    indices: Any
    place: Place

    def said(self) -> str:
        """Return the first line with inf or NaN that reads none, or the function."""
        found, result, end = list[str](), None, own_time() + SECONDS

        def enter(frame: FrameType, *_: Any) -> Any:
            if own_time() > end:
                raise OutOfTime
            code, number, outer = frame.f_code, frame.f_lineno, len(found)
            if not is_users(code.co_filename) or is_of_package(code.co_filename):
                return None
            bad = _bad_in(frame)

            def after_line(frame: FrameType, event: str, value: Any) -> Any:
                nonlocal number, bad
                now, is_end = _bad_in(frame), event == "return"
                text = linecache.getline(code.co_filename, number).strip()
                if is_end and not is_bad(value):  # it has put all right
                    del found[outer:]
                elif (is_end or now - bad) and not bad.intersection(re.findall(r"\w+", text)):
                    names = {n for n in re.findall(r"/\s*\(?(\w+)", text) if _is_zero(frame, n)}
                    where = "".join(f", where {name} is 0" for name in names)
                    line = Line(code.co_filename, number, code.co_name, text)
                    found.append(FIRST.format(where, line_text(line)))
                number = number if text.startswith("return") else frame.f_lineno  # or ends a `with`
                bad = now
                return after_line

            return after_line

        before, states = sys.gettrace(), RandomStates(accelerators())
        with ExitStack() as stack, suppress(Exception):
            hidden = (modes.no_function_modes(), modes.unseen_by_modes(), unobserved())
            for each in (*hidden, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())):
                stack.enter_context(each)
            sys.settrace(enter)
            try:
                result = self._again()
            finally:
                sys.settrace(before)
                states.restore()
        code = self.place.code
        name, file = code.co_qualname.rpartition("<locals>.")[2], short_path(code.co_filename)
        is_found = bool(found) and is_bad(result)
        return found[0] if is_found else LOADED_BY.format(name, file, code.co_firstlineno)

    def _again(self) -> Any:
        held = values_reached(self.dataset, leave_out=())
        if sum(getattr(each, "nbytes", 0) for each in held) > LARGEST_COPY:
            return None
        dataset = copy.deepcopy(self.dataset)  # it may change itself, and open files have no copy
        if not isinstance(self.indices, list):
            return self.collate(dataset[self.indices])
        several = getattr(dataset, "__getitems__", lambda all_: [dataset[each] for each in all_])
        return self.collate(several(self.indices))


def _bad_in(frame: FrameType) -> set[str]:
    return {name for name, value in frame.f_locals.items() if is_bad(value)}


def is_bad(value: Any) -> bool:
    """Return whether a value, or one in containers, is not finite; a mask may be so."""
    tensors = tensors_in([map_leaves(as_tensor, value)])
    return any(not is_finite(each) and not is_mask(each) for each in tensors)


def _is_zero(frame: FrameType, name: str) -> bool:
    return any(bool((n == 0).any()) for n in tensors_in([as_tensor(frame.f_locals.get(name))]))


def as_tensor(value: Any) -> Any:
    """Return a float or a copy of an array of NumPy as a tensor, and other values as they are."""
    is_numpys = "numpy" in str(type(value)) and hasattr(value, "nbytes")
    is_float = isinstance(value, float) or (is_numpys and value.dtype.char in "efd")
    return torch.tensor(value) if is_float else value
