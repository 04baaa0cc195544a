"""A policy for the autocast of code that one does not write."""

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from torch import nn

from halfstep._autocast import kernels, scopes
from halfstep._autocast.context import default_device, settled_policy
from halfstep._autocast.modules import name_modules
from halfstep._autocast.policy import Policy
from halfstep._pytorch import compiler
from halfstep.errors import CallOrderError

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class use_policy:
    """Let every autocast inside a block follow a policy, whoever enters it; switch nothing on.

    Frameworks enter ``torch.autocast`` somewhere inside, where no policy can be given. In this
    block it follows this one, on the CPU and the accelerator of this machine, and so does
    :class:`halfstep.autocast` without a policy of its own. Ops outside of any autocast run as they
    are. A context manager and a decorator; they nest, and the innermost counts.

    It holds for this thread, for checkpoints that are recomputed in others, and in the block's time
    for all threads that have no policy of their own, such as those of ``DataParallel``. Code that
    ``torch.compile`` makes is made for the policy; where another thread calls it, enter
    ``use_policy`` in that thread too.

    Args:
        policy: A :class:`Policy` or its text: a preset and rules, ``"torch; softmax:lower"``.
        module: The model, where the policy has rules for modules (``"standard; @head:fp32"``).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The policy is not one, or has rules for modules and there is no model, or none
            of its modules is meant.
        CallOrderError: It is left in another thread, or before what was entered inside it.

    Sync: none.

    Example:
        >>> import torch
        >>> linear = nn.Linear(4, 2)
        >>> with use_policy("standard; linear:fp32"):
        ...     with torch.autocast("cpu", torch.bfloat16):  # in a framework
        ...         y = linear(torch.ones(1, 4))
        >>> y.dtype
        torch.float32
    """

    def __init__(self, policy: Policy | str, *, module: nn.Module | None = None) -> None:
        if policy is None:
            raise TypeError("use_policy(None): pass a policy or its text, such as 'standard'")
        settled = settled_policy(policy)
        if settled.module_rules:
            name_modules(module, settled)
        devices = dict.fromkeys(("cpu", default_device()))
        self._policies = [kernels.prepared(kernels.prepare(settled, each)) for each in devices]
        self._is_entered = False
        self._ambient = scopes.NO_POLICIES

    @compiler.do_not_compile_alone
    def __enter__(self) -> Self:
        if self._is_entered:
            raise CallOrderError(f"{self!r} is entered already; make another one")
        outer = scopes.current()
        scopes.enter(outer, self._within(outer.policies or scopes.ambient), block=self)
        self._is_entered = True
        with _lock:
            self._ambient = self._within(scopes.ambient)
            _entered.append(self._ambient)
            scopes.ambient = self._ambient
        return self

    @compiler.do_not_compile_alone
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_entered:
            raise CallOrderError(f"{self!r} is left and was not entered")
        self._is_entered = False
        with _lock:
            # Equal ones are one object: which of two threads has left makes no difference.
            del _entered[max(n for n, each in enumerate(_entered) if each is self._ambient)]
            scopes.ambient = _entered[-1] if _entered else scopes.NO_POLICIES
        scope = scopes.current()
        if scope.block is self:
            scopes.leave(scope)
            return
        where = "before a context that was entered in it"
        if not scopes.leave_below(self):
            where = "in another thread than it was entered in"
        if kind is None:  # an error that is on its way tells more
            raise CallOrderError(f"{self!r} is left {where}")

    def __call__(self, function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        """Return ``function`` with its calls run in such a block."""

        @functools.wraps(function)
        def under_policy(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            block = object.__new__(use_policy)  # a call may be inside of another one
            block._policies, block._is_entered = self._policies, False
            with block:
                return function(*args, **kwargs)

        return under_policy

    def __repr__(self) -> str:
        return f"use_policy({str(self._policies[0].policy)!r})"

    def _within(self, policies: scopes.Policies) -> scopes.Policies:
        for each in self._policies:
            policies = policies.with_policy(each)
        return policies


_entered: list[scopes.Policies] = []
_lock = threading.Lock()
