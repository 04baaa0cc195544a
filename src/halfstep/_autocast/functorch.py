"""Carrying out a policy inside ``torch.func``: vmap, grad, jvp and what is made of them.

There the dispatcher comes to the keys of functorch before the Autocast keys. vmap takes a composite
such as ``linear`` apart, or replaces an op by its batched form, before autocast can see which op
was called; and what autocast has switched off inside an op is on again in the next transform. So
each op of a policy's table gets a kernel of ours at the keys of functorch too. It does to the op
what the policy says, with autocast off for every transform below, and goes on to the kernel that
was there.

Not so ``mul``, ``add`` and their like, to whose kernels PyTorch gives ``x * 2`` in a form that none
can pass on. They are no composites: below vmap they come to the Autocast keys as they are.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from halfstep._autocast import scopes
from halfstep._autocast.casts import tensors_in
from halfstep._autocast.op_names import overload
from halfstep._pytorch import compiler, dispatch, library


def register(ops: Iterable[str]) -> None:
    """Register our kernels for overloads at the keys of functorch, each once and for good."""
    for op in sorted(ops):
        if not dispatch.takes_numbers(overload(op)):
            for key in dispatch.FUNCTORCH_KEYS:
                _register(op, key)


@cache
def _register(name: str, key: torch._C.DispatchKey) -> None:
    op = overload(name)
    pytorch = torch.library.get_kernel(op, key).call_boxed
    is_composite = dispatch.is_composite(op)

    @compiler.do_not_compile_alone
    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        device = _device_of((*args, *kwargs.values()))
        if device is None:
            return pytorch(keys, *args, **kwargs)
        cast = scopes.current().policies[device].casts().get(name)
        if cast is not None:
            return cast(keys, *args, **kwargs)
        if is_composite:  # the ops it is made of have rules of their own
            return pytorch(keys, *args, **kwargs)
        # Its batched form has none: matmul in the place of a mm that is left alone.
        with dispatch.exclude_keys(dispatch.key_set(dispatch.autocast_key(device))):
            return pytorch(keys, *args, **kwargs)

    library.register_kernel(op, key, kernel)


def _device_of(args: Iterable[Any]) -> str | None:
    """Return the device type of a tensor for which a policy is active and autocast is on."""
    for device in filter(torch.is_autocast_enabled, scopes.current().policies):
        if any(tensor.device.type == device for tensor in tensors_in(args)):
            return device
    return None
