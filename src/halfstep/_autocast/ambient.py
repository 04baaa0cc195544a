"""A policy for autocast contexts in other people's code."""

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
    """Apply a policy to every autocast context in a block, without enabling autocast.

    Frameworks enter ``torch.autocast`` internally and offer no way to pass a policy. In this block
    such contexts use this policy, on the CPU and on this machine's accelerator, and so does
    :class:`halfstep.autocast` without a policy of its own. Ops outside of any autocast are
    unaffected. It is a context manager and a decorator; blocks nest, and the innermost wins.

    It applies to this thread, to checkpoints recomputed in other threads, and during the block to
    all threads without a policy of their own, such as those of ``DataParallel``. ``torch.compile``
    compiles code for the policy; if another thread calls that code, enter ``use_policy`` there too.

    Args:
        policy: A :class:`Policy` or its text: a preset and rules, ``"torch; softmax:lower"``.
        module: The model, if the policy has rules for modules (``"standard; @head:fp32"``).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The policy is invalid, or it has rules for modules and the model is missing or
            has no matching modules.
        CallOrderError: It is exited in another thread, or before a context that was entered inside
            it.

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
        scopes.enter(outer, self._within(outer.policies or scopes.ambient), context=self)
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
            # Equal entries are the same object, so it does not matter which thread exits first.
            del _entered[max(n for n, each in enumerate(_entered) if each is self._ambient)]
            scopes.ambient = _entered[-1] if _entered else scopes.NO_POLICIES
        scope = scopes.current()
        if scope.context is self:
            scopes.leave(scope)
            return
        where = "before a context that was entered in it"
        if not scopes.leave_below(self):
            where = "in another thread than it was entered in"
        if kind is None:  # the propagating error is more informative
            raise CallOrderError(f"{self!r} is left {where}")

    def __call__(self, function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        """Return ``function`` with each call run in such a block."""

        @functools.wraps(function)
        def under_policy(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            block = object.__new__(use_policy)  # calls may be nested
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
