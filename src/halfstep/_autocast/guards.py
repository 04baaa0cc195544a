"""Code that torch.compile made under one policy must not run under another.

Its guards and the keys of its on-disk caches know the switches of autocast, not our policies. So a
thread that activates policies also writes a number for them where the guards look, and a
fingerprint into the tag that is part of every key.
"""

import threading
from typing import TYPE_CHECKING, NamedTuple

from halfstep._pytorch import compiler

if TYPE_CHECKING:
    from halfstep._autocast.scopes import Policies


class _Mark(NamedTuple):
    """What torch.compile knows a set of policies by.

    Attributes:
        guard: unique in this process.
        tag: in the keys of caches; the same in every process.
    """

    guard: compiler.CompileGuard
    tag: str


class _Thread(threading.local):
    followed: "Policies | None" = None
    outside = compiler.compile_guard()  # as it was before there were policies


_thread = _Thread()
_marks: dict[frozenset[int], _Mark] = {}
_lock = threading.Lock()


def follow(policies: "Policies") -> None:
    """Let torch.compile know, in this thread, that these policies are active now.

    The tag holds for the whole process: compiling in two threads under different policies at the
    same time can miss a cache that would have been right.
    """
    followed = _thread.followed
    if policies is followed:
        return
    if not followed:
        _thread.outside = compiler.compile_guard()
    if policies:
        guard, tag = _marks.get(policies.key) or _mark(policies)
    else:
        guard, tag = _thread.outside, ""
    _thread.followed = policies
    compiler.set_compile_guard(guard)
    compiler.set_compile_cache_tag(tag)


def _mark(policies: "Policies") -> _Mark:
    tag = ",".join(f"{d}:{policies[d].fingerprint}" for d in sorted(policies))
    with _lock:
        if len(_marks) == compiler.NUM_GUARD_VALUES:
            compiler.forget_compiled_code()
            _marks.clear()
        return _marks.setdefault(policies.key, _Mark(compiler.numbered_guard(len(_marks)), tag))
