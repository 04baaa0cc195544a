"""Large and non-finite values in what a model or a loss is given, and in the data set."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice, starmap, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep._common.nested import tensors_in
from halfstep._common.numbers import listed
from halfstep._pytorch import modes
from halfstep._tools.diagnose.inspect_op import bad_entries
from halfstep._tools.diagnose.several_steps import FAR, Change
from halfstep._tools.measure import LARGE_DATA, bytes_of, is_finite, is_large_in_most, is_mask
from halfstep._tools.replay.blame import name_in_code
from halfstep._tools.replay.kept_calls import (
    LARGEST_COPY,
    KeptCall,
    data_again,
    given_others,
    is_model,
    needed_for,
)
from halfstep._tools.user_code import is_same_view, path_to, span_of, tree_of
from halfstep._tools.watch.loads import as_tensor

HOW_TO_STANDARDISE = "(x - x.mean(0)) / (x.std(0) + 1e-6) of the training data"
OUTLIER = (
    "leave out {}, or check how it was read, as in another unit: {} reaches {}, and in the step "
    "before it reached {}; with values up to that the step is finite"
)
_OUTLIER = 1e4
"""How far the data of a batch are beyond those of the one before if the batch is the cause."""
_DIFFERENCES = ("sub", "__sub__", "__rsub__")
_PRODUCTS = ("matmul", "__matmul__", "mm", "mv", "linear", "addmm", "einsum")
_PARTS = ("__getitem__", "index_select", "to", "float", "half", "bfloat16")
_LONGEST = 40  # the number of characters of the longest call that serves as a name
_SIZES = ("abs", "__abs__", "pow", "__pow__", "square")


class _Data(NamedTuple):
    """Tensor of data that a step reads, and the data that it is a part of."""

    name: str
    call: KeptCall  # that reads it
    tensor: Tensor
    source: Tensor
    given: Tensor | KeptCall  # the data, or the call that makes it of numbers each time

    @property
    def said(self) -> str:
        """A sentence on its values, or on those of the data, if they are large."""
        return _said(self.name, self.tensor) or _said(self.name, self.source)


def standardise(calls: Sequence[KeptCall], before: Sequence[KeptCall]) -> tuple[str, Change | None]:
    """Return the cure of inputs and targets with large values, and a change that standardises them.

    The text is empty if there are none. The change is None unless they are large in most rows, and
    were so in the calls of the step before. If they are far beyond those of that step, the change
    limits them to what these were. Sync.
    """
    with modes.unseen_by_modes(), torch.no_grad():
        found = [*_data(calls)]
        if (outlier := _outlier(found, calls, before)) is not None:
            return outlier
        large = [each for each in found if each.said]
        last = [each for each in _data(before) if each.said and _is_large_in_most(each)]
        now = [*filter(_is_large_in_most, large)]
        known = {each.name for each in (last if before else now)}
        found = [each for each in (*now, *last) if each.name in known]
        scaled = {id(each.given): (each.given, _scaled(each.source)) for each in found}
    said = {each.name: each.said for each in large}
    names, sizes = listed([*said]), "; ".join(said.values())
    text = f"standardise {names}, as by {HOW_TO_STANDARDISE}: {sizes}" if said else ""
    is_changed = bool(now and scaled)
    change = partial(given_others, [*calls, *before], [*scaled.values()])
    return text, change if is_changed else None


def _outlier(
    found: Sequence[_Data], calls: Sequence[KeptCall], before: Sequence[KeptCall]
) -> tuple[str, Change] | None:
    """Return what to do with data far beyond those of the step before, and a change; or None."""
    for data in found:
        largest = _largest(data.tensor)
        same = (call for call in before if largest >= LARGE_DATA and _is_same(call, data.call))
        given = chain.from_iterable(call.placeholders() for call in same)
        made = (t for t in map(data_again, given) if t is not None and not t.requires_grad)
        usual = max((_largest(t) for t in made if t.shape[1:] == data.tensor.shape[1:]), default=0)
        if not 0 < _OUTLIER * usual < largest < math.inf:
            continue
        rows = data.tensor.float().abs().reshape(len(data.tensor), -1).amax(1)
        entries = bad_entries(rows.masked_fill(rows > FAR * usual, math.nan))
        what = entries.removeprefix(" in ") or "this batch"
        sizes = map(size_text, (largest, usual))
        text = OUTLIER.format(what, data.name, *sizes)
        reading = [call for call in calls if call.number >= data.call.number]
        pairs = [(data.given, data.source.clamp(-usual, usual))]
        return text, partial(given_others, reading, pairs)
    return None


def _is_same(call: KeptCall, other: KeptCall) -> bool:
    is_here = call.at is not None and other.at is not None and call.at.is_at(other.at)
    return is_here and call.function is other.function


def _largest(tensor: Tensor | None) -> float:
    """Return the largest magnitude of data; 0 if it is not known."""
    if tensor is None or not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    return float(tensor.float().abs().amax())


def _scaled(tensor: Tensor) -> Tensor:
    values = tensor.float() if tensor.dim() == 2 else tensor.float().reshape(-1, 1)
    found = (values - values.mean(0)) / (values.std(0, correction=0) + 1e-6)
    return found.reshape(tensor.shape).to(tensor.dtype)


def _is_large_in_most(data: _Data) -> bool:
    tensor = data.source
    return bytes_of(tensor) <= LARGEST_COPY and not is_mask(tensor) and is_large_in_most(tensor)


def _data(calls: Sequence[KeptCall]) -> Iterator[_Data]:
    """Yield the data that modules, losses and products with weights are given."""
    for call, following in zip_longest(calls, calls[1:]):
        is_error = call.name in _DIFFERENCES and following and following.name in _SIZES
        arguments, is_module = [*_arguments(call)], isinstance(call.function, nn.Module)
        is_product = call.name in _PRODUCTS and any(each.requires_grad for each, _ in arguments)
        if is_error or is_module or is_product or call.name.endswith("loss"):
            for tensor, made_by in chain.from_iterable(starmap(_data_in, arguments)):
                is_data = tensor.layout is torch.strided and not tensor.requires_grad
                if not (tensor.is_floating_point() and tensor.dim() and is_data):
                    continue
                name, source = _name(tensor, made_by), _source(tensor, made_by)
                if name.endswith("without a name"):
                    name = f"the input of {type(call.function).__name__}" if is_module else ""
                if name:
                    given = made_by if made_by and _is_remade(made_by) else source
                    yield _Data(name, call, tensor, source, given)


def _arguments(call: KeptCall) -> Iterator[tuple[Tensor, KeptCall | None]]:
    """Yield the tensors that a call was given; of rows or a cast now gone, what they are of.

    A tensor of numbers, such as ``torch.tensor(rewards)``, is made again.
    """
    yield from call.arguments()
    for made in call.of:
        if made.name in _PARTS and not made.still_there():
            yield from islice(_arguments(made), 1)
        elif _is_remade(made):
            yield made.function(*made.args, **made.kwargs or {}), made


def _is_remade(call: KeptCall) -> bool:
    """Return whether the loop makes a tensor of plain numbers in each step, and has kept none."""
    is_known = call.is_constant and call.random is None and not call.still_there()
    return is_known and _is_plain([call.args, *(call.kwargs or {}).values()])


def _is_plain(value: object) -> bool:
    """Return whether a value stays as it is: others, such as an array, may have changed since."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | torch.dtype | torch.device | None)


def _data_in(tensor: Tensor, made_by: KeptCall | None) -> Iterator[tuple[Tensor, KeptCall | None]]:
    """Yield a tensor, or, if results of a model are in it, the data that they were added to."""
    calls = needed_for([] if made_by is None else [made_by])
    of_model: set[KeptCall | None] = {each for each in calls if is_model(each.function)}
    if not of_model:
        yield tensor, made_by
        return
    for call in () if tensor.requires_grad else calls:
        if of_model.intersection(call.of) and not is_model(call.function):
            of_model.add(call)
            yield from (each for each in _arguments(call) if each[1] not in of_model)


def _source(tensor: Tensor, made_by: KeptCall | None) -> Tensor:
    """Return the tensor that another one is rows or a cast of."""
    source = [] if made_by is None or made_by.name not in _PARTS else [*_arguments(made_by)]
    return _source(*source[0]) if source else tensor


def _name(tensor: Tensor, made_by: KeptCall | None) -> str:
    """Return the name of a tensor, or of the one that some of its rows are of, as ``x[rows]``."""
    name = name_in_code(tensor).partition(" in ")[0]
    if made_by is None or not name.endswith("without a name"):
        return name
    source = [*_arguments(made_by)] if made_by.name in _PARTS else []
    call = _expression(made_by) if made_by.is_constant else ""
    return _name(*source[0]) if source else call or name


def _expression(call: KeptCall) -> str:
    at = call.at
    node = at and tree_of(at.code.co_filename).at.get(span_of(at.code, at.instruction))
    code = ast.unparse(node) if node else ""
    return code if len(code) <= _LONGEST else ""


def _said(name: str, tensor: Tensor) -> str:
    """Return how large the values of a tensor are, by column; empty if they are small."""
    if not tensor.numel() or not is_finite(tensor):
        return ""
    sizes = tensor.float().abs()
    columns = sizes.amax(0) if tensor.dim() == 2 else sizes.amax().reshape(1)
    largest, column = map(float, columns.max(0))
    if largest < LARGE_DATA:
        return ""
    columns[int(column)] = 0
    other = float(columns.max())
    if len(columns) == 1 or other > largest / 2:
        return f"{name} reaches {size_text(largest)}"
    which = f"column {int(column)} of {len(columns)} (from 0)"
    return f"{name} reaches {size_text(largest)} in {which}, {size_text(other)} in the others"


def bad_data(dataset: Any) -> list[tuple[Tensor, str]]:
    """Return the tensors of a data set that are not finite, each with a sentence. Sync: several."""
    while hasattr(dataset, "dataset"):  # such as a Subset
        dataset = dataset.dataset
    of = type(dataset).__name__
    with modes.unseen_by_modes():
        held = {key: as_tensor(each) for key, each in getattr(dataset, "__dict__", {}).items()}
        return [
            (tensor, f"{path} of {of} is not finite{bad_entries(tensor)}")
            for key in held
            for tensor in tensors_in([held[key]])
            if tensor.dim()
            and not is_finite(tensor)
            and (path := path_to(partial(is_same_view, tensor), key, held[key], 0))
        ]


def size_text(value: float) -> str:
    """Format a size: ``1,234,567``, ``1e+30``."""
    return f"{value:,.0f}" if 100 <= value < 1e12 else f"{value:.2g}"
