"""Comparison of the states of a scaler on all ranks: do they differ, and who has what."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

from torch import distributed

from halfstep._pytorch.distributed import default_store
from halfstep._scaler.checks import float32_from_bits
from halfstep._scaler.device_state import HostCopy
from halfstep._scaler.ranks.group import Group
from halfstep.errors import HalfstepWarning, RanksError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from halfstep._scaler.loss_scale import LossScale

CHECK_EVERY = 100
"""Ranks compare every so many times what would cost a wait or a request if compared each time."""

_T = TypeVar("_T")


def require_same(group: Group, call: str, state: Mapping[str, Any]) -> None:
    """Raise RanksError on all ranks if a scaler, as it is saved, is not the same. Sync: one."""
    digest = zlib.crc32(json.dumps(state, sort_keys=True).encode())
    own = [float(number) for number in (digest, state["_growth_tracker"], state["scale"])]
    rows = group.gather(own, f"{call}: the state of each rank")
    if len(set(rows)) > 1:
        raise RanksError(
            f"{call}: nothing is saved, since the ranks have different states:\n"
            + group.lines(rows, lambda row: f"scale {row[2]:g}, growth tracker {row[1]:.0f}")
            + "\nCure: load the same state on all ranks, or set one scale on all of them: "
            "scaler.update(new_scale=...)"
        )


class StateComparison:
    """The states of one scaler on all ranks, compared now and then through the store of the job.

    For ranks that decide alone since DistributedDataParallel gives them equal gradients. There is
    no collective: a rank that has left out an update would pair it with one of the script's.

    The first rank to come leaves its state in the store, a rank with another state leaves a note,
    and all look for notes ``CHECK_EVERY`` updates later. Gradients were averaged in between, so
    that every rank has been there by then, and all raise in the same update.
    """

    def __init__(self) -> None:
        self._num_updates = 0
        self._world: ref[ProcessGroup] | None = None
        self._number: int | None = None  # of the scaler in this world
        self._key: str | None = None  # of the comparison whose notes are to be looked for
        self._copies: dict[str | None, HostCopy] = {}  # of the states, until they are in the store
        self._is_over = False

    def count_update(self, scales: Mapping[str | None, LossScale]) -> None:
        """Count an update, and compare the states after every ``CHECK_EVERY`` of them. Sync: none.

        If the states differed at the last comparison all ranks raise.
        """
        self._num_updates += 1
        if self._num_updates % CHECK_EVERY == 0:
            self._require_no_notes()
            self._begin(scales)
        if self._copies:
            self._leave_state()

    def _begin(self, scales: Mapping[str | None, LossScale]) -> None:
        world = distributed.group.WORLD
        assert world is not None
        if self._world is None or self._world() is not world:
            self._world, self._number = ref(world), self._ask(_number_scaler)
        self._key = f"halfstep/states/{self._number}/{self._num_updates}"
        for name in sorted(scales, key=repr):
            live = scales[name].live
            if live is not None:
                self._copies[name] = HostCopy()
                self._copies[name].send(live.counters())

    def _leave_state(self) -> None:
        """Put the state into the store, once it has come to the host."""
        arrived = {name: copy.latest() for name, copy in self._copies.items()}
        rows = [[name, *row.tolist()] for name, row in arrived.items() if row is not None]
        if len(rows) == len(arrived):
            self._copies = {}
            self._ask(_leave, self._key, json.dumps(rows))

    def _require_no_notes(self) -> None:
        key, self._key, self._copies = self._key, None, {}
        states = key and self._ask(_different_states, key)
        if states:
            raise RanksError(
                f"update(): {CHECK_EVERY} updates ago the ranks had different states, and their "
                "weights may differ as well:\n"
                + Group.world().lines(states, _describe_all)
                + "\nCause: gradients that were changed on some ranks after "
                "DistributedDataParallel had averaged them, a checkpoint or update(new_scale=...) "
                "on some ranks only, or calls of the scaler that some ranks leave out.\n"
                "Cure: load the same checkpoint on all ranks, one from before that. With "
                "process_group=torch.distributed.group.WORLD, for GradScaler or guard, all ranks "
                "decide together, in every step."
            )

    def _ask(self, function: Callable[..., _T], *args: Any) -> _T | None:
        """Call a function with the store; once that has failed, do nothing any more."""
        if self._is_over:
            return None
        try:
            return function(default_store(), *args)
        except RuntimeError as error:
            self._is_over = True
            first_line = str(error).strip().split("\n")[0]
            warnings.warn(
                "the states of the ranks are no longer compared, since the store of the process "
                f"group has failed: {first_line}",
                HalfstepWarning,
                stacklevel=8,
            )
            return None


def _number_scaler(store: Any) -> int:
    """Return a number for a scaler, the same on all ranks.

    It counts the scalers that this rank compares: there may be others that never step. The count
    is in the store, since a process may have been in other worlds than those it is with now.
    """
    number: int = store.add(f"halfstep/states/rank {distributed.get_rank()}", 1)
    return number


def _leave(store: Any, key: str, state: str) -> None:
    """Leave a state, or a note if another rank has left another one."""
    if store.compare_set(key, "", state) != state.encode():
        place = store.add(f"{key}/notes", 1)
        store.set(f"{key}/notes/{place}", json.dumps([distributed.get_rank(), state]))


def _different_states(store: Any, key: str) -> list[str]:
    """Return the states of all ranks, nothing if they are the same."""
    if not store.check([f"{key}/notes"]):
        if distributed.get_rank() == 0:
            store.delete_key(key)
        return []
    num_notes = store.add(f"{key}/notes", 0)
    keys = [f"{key}/notes/{place}" for place in range(1, num_notes + 1)]
    state, *notes = (value.decode() for value in store.multi_get([key, *keys]))
    states = [state] * distributed.get_world_size()
    for note in notes:
        rank, states[rank] = json.loads(note)
    return states


def _describe_all(state: str) -> str:
    return "; ".join(
        describe(counters) if name is None else f"loss {name!r}: {describe(counters)}"
        for name, *counters in json.loads(state)
    )


def describe(row: Sequence[float]) -> str:
    """Return what ``DeviceState.counters`` holds, for a message."""
    scale, tracker, taken, skipped = map(int, row)
    return (
        f"scale {float32_from_bits(scale):g}, growth tracker {tracker}, {taken} steps taken, "
        f"{skipped} skipped"
    )
