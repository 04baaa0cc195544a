"""Code that torch.compile made under one policy must not run under another.

Its guards and the keys of its on-disk caches know the switches of autocast, not our policies. So a
thread that activates policies also writes a number for them where the guards look, and a
fingerprint into the tag that is part of every key.
"""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from halfstep import _torch

if TYPE_CHECKING:
    from halfstep.casting.plans import PolicyOnDevice


class _Mark(NamedTuple):
    """What torch.compile knows a set of policies by.

    Attributes:
        number: in the guards; unique in this process.
        tag: in the keys of caches; the same in every process.
    """

    number: int | None
    tag: str


_NO_POLICY = _Mark(None, "")
_marks: dict[frozenset[int], _Mark] = {}
_lock = threading.Lock()


def follow(policies: "Mapping[str, PolicyOnDevice]") -> None:
    """Let torch.compile know, in this thread, that these policies are active now.

    The tag holds for the whole process: compiling in two threads under different policies at the
    same time can miss a cache that would have been right.
    """
    number, tag = _mark(policies) if policies else _NO_POLICY
    _torch.set_compile_guard(number)
    _torch.set_compile_cache_tag(tag)


def _mark(policies: "Mapping[str, PolicyOnDevice]") -> _Mark:
    key = frozenset(map(id, policies.values()))  # they are kept for good, so are their ids
    mark = _marks.get(key)
    if mark is None:
        tag = ",".join(f"{d}:{policies[d].fingerprint}" for d in sorted(policies))
        with _lock:
            if len(_marks) == _torch.NUM_GUARD_VALUES:
                _torch.forget_compiled_code()
                _marks.clear()
            mark = _marks.setdefault(key, _Mark(len(_marks), tag))
    return mark
