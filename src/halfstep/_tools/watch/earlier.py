"""What the loop made, wrote or loaded before a step went bad, and what is said of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from halfstep._common.module_names import without_wrappers
from halfstep._common.text import names_text
from halfstep._tools.diagnose.diagnose import diagnosis_of_calls
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.line import line_text
from halfstep._tools.measure import is_mask
from halfstep._tools.replay import LEFT_GRADIENTS
from halfstep._tools.replay.blame import name_in_code, names_in
from halfstep._tools.replay.kept_calls import KeptCall, Made, needed_for, weights_of
from halfstep._tools.user_code import Place, called_by_user
from halfstep._tools.watch.bad_steps import are_finite
from halfstep._tools.watch.call_log import CallLog
from halfstep._tools.watch.inputs import HOW_TO_STANDARDISE, bad_data, size_text
from halfstep._tools.watch.schedules import lines_with

WROTE_BUFFERS = "it made {names} inf or NaN; the loss of this step is finite"
AFTER_THE_STEP = "its numbers are those of a replay with the weights from after the step"
AGAIN = "\nif it wrote inf or NaN, fix it, or the same happens again"
LAST_WRITE = f"first check the code that made it or last wrote to it: {{line}}{AGAIN}"
COMES_FROM = "what the loop wrote to {name} comes from it: {line}"
MADE_BEFORE = "{name} comes from it, and was made before the loop or in its first step: {line}"
OVERFLOWED = (
    "make it float32: this line wrote finite values to it, up to {largest}, and float16 ends "
    "at 65,504: {line}"
)

STANDARDISE = f"or standardise it before that, as by {HOW_TO_STANDARDISE}"
_LOAD = re.compile(r"\bload(_\w+)?\(")  # a call, and no loader


class Earlier:
    """What the loop last wrote to tensors, and where, by the log of its calls.

    ``diagnosis_of`` returns the diagnosis of a value that the loop computed, and ``is_told``
    whether a bad weight or buffer with a name is that of a reported step.
    """

    def __init__(
        self,
        log: CallLog,
        model: Callable[[], nn.Module | None],
        diagnosis_of: Callable[[Made], Diagnosis | None],
        is_told: Callable[[str | None], bool],
    ) -> None:
        self._log, self._model, self._diagnosis_of = log, model, diagnosis_of
        self._is_told = is_told

    def of_gradients(self, weights: Iterable[Tensor]) -> Diagnosis | None:
        """Return the diagnosis of what the loop last wrote to gradients in this step, or None."""
        gradients = (weight.grad for weight in weights)
        bad = (grad for grad in gradients if grad is not None and not are_finite([grad]))
        return next(filter(None, map(self._of_write, bad)), None)

    def _of_write(self, tensor: Tensor, name: str = "") -> Diagnosis | None:
        """Return the diagnosis of what the loop last wrote to a tensor in this step."""
        value, at = self._log.wrote(tensor)
        found = None if value is None else self._diagnosis_of(value)
        if found is None or at is None or found.verdict not in ("maths", "range"):
            return found
        name = name or names_in(self._model())(tensor) or called_by_user(tensor) or ""
        name = name or self._log.name_in_models(tensor) or name_in_code(tensor)
        is_older = self._log.made_bad(tensor) is not None
        comes = (MADE_BEFORE if is_older else COMES_FROM).format(name=name, line=line_text(at.line))
        notes = tuple(note for note in found.notes if note != LEFT_GRADIENTS)
        return replace(found, happened=comes, notes=notes)

    def of_written(self, found: Diagnosis, calls: Sequence[KeptCall]) -> Diagnosis:
        """Name where the loop last wrote to a bad weight or argument of calls, first in the cure.

        If it computed what it wrote from finite values, that is diagnosed instead.
        """
        log = self._log
        bad = [tensor for tensor in weights_of(calls) if not are_finite([tensor])]
        data = [] if is_of_the_model(found) else bad_data(log.dataset)
        names = {each: said.partition(" is not")[0] for each, said in data}
        both = [*bad, *names]
        wrote = ((each, *log.wrote(each)) for each in both)
        places = {
            each: at for each, value, at in wrote if at and not (value and value.call in calls)
        }
        of_set = [each for each in places if each in names]
        tensor = next(iter([*of_set, *places]), None)  # a data set before its batch
        place = None if tensor is None else places[tensor]
        halves = [each for each in both if self._overflowed(each)]
        if found.cure is None:
            return found
        text = [found.cure.text]
        written = [LAST_WRITE.format(line=line_text(place.line))] if place else []
        load = None if tensor is None else log.loads.get(tensor)
        if load is not None and place is load.place:
            written = [load.said() + AGAIN]
        if halves:
            written = [*self._overflowed(halves[-1]), *[STANDARDISE] * (halves[-1] in names)]
        elif tensor is not None and tensor not in log.spoilt_at:
            for each in (*of_set, *places)[: len(of_set) + 1]:
                own = self._of_write(each, names.get(each, ""))
                is_made = own is not None and own.verdict in ("maths", "range")
                if own is not None and (is_made or self._is_told(own.tensor)):
                    return own
            if own is not None and place is not None:
                written = [_of_bad_write(place, own)]
                text = text if log.made_bad(tensor) else []
        elif found.bad and found.bad.line and is_of_the_model(found):
            loads = lines_with(found.bad.line.file, {"load_state_dict"})
            written = ["first check what these lines load, if they ran:", *loads] if loads else []
        text = [*written, *(said for _, said in data), *text]
        return replace(found, cure=replace(found.cure, text="\n".join(text)))

    def said(self, tensor: Tensor, *, is_new: bool = False) -> list[str]:
        """Return what to say of the line that last wrote to a bad tensor, or made it, if any."""
        place = self._log.place_of(tensor, is_new=is_new)
        last = [] if place is None else [LAST_WRITE.format(line=line_text(place.line))]
        return self._overflowed(tensor) or last

    def _overflowed(self, tensor: Tensor) -> list[str]:
        """Return what to say of the line that wrote too large a value to a float16 tensor."""
        half = self._log.halves.get(tensor)
        if half is None or not half.largest.isfinite():
            return []
        line = line_text(half.place.line)
        return [OVERFLOWED.format(largest=size_text(half.largest.item()), line=line)]


def is_of_the_model(found: Diagnosis) -> bool:
    """Return whether a tensor of the model was bad before the step."""
    return found.bad is not None and any(each.name == found.tensor for each in found.bad.inputs)


def _of_bad_write(place: Place, found: Diagnosis) -> str:
    """Return the cure of a tensor to which a line wrote inf or NaN that it was given, or loads."""
    statement, line = place.statement, line_text(place.line)
    is_load = statement is not None and _LOAD.search(ast.unparse(statement)) is not None
    is_named = found.tensor is not None and "without a name" not in found.tensor
    name = found.tensor if is_named else "it"
    text = f"first check {name}: it was inf or NaN when this line wrote it: {line}"
    text = f"what this line loads is the cause: {line}" if is_load else text
    read = next((each for each in found.bad.inputs if each.inf), None) if found.bad else None
    if read is not None and read.dtype == "float16" and not read.nan:
        ends = f"it has {read.inf:,} inf in float16, which ends at 65,504: save it in float32"
        return "\n".join([text, ends, *lines_with(place.code.co_filename, {"save"})])
    return f"{text}\nload an earlier checkpoint: this one has inf or NaN" if is_load else text


def of_buffers(
    names: list[str],
    ends: Sequence[KeptCall],
    model: nn.Module | None,
    scale: float | None,
    seconds: float,
) -> Diagnosis | None:
    """Return the diagnosis of a pass that made buffers bad of finite values, replayed; or None."""

    def buffers() -> list[Tensor]:
        named = [] if model is None else model.named_buffers()
        return [buffer for name, buffer in named if without_wrappers(name) in names]

    if all(map(is_mask, buffers())):
        return None
    calls = needed_for(ends)
    found, _ = diagnosis_of_calls(calls, None, scale, model, seconds=seconds, results=buffers)
    if found is None or found.verdict not in ("maths", "range"):
        return None
    event = WROTE_BUFFERS.format(names=names_text(names))
    return replace(found, happened=event, notes=(*found.notes, AFTER_THE_STEP))
