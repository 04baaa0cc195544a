"""Functions by which tools control autocast: a replay changes what the user's contexts ask for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from halfstep._autocast import kernels, scopes
from halfstep._autocast.kernels import fitting_numbers as fitting_numbers
from halfstep._autocast.modules import Wrapped, name_modules, unwrap
from halfstep._autocast.policy import Policy
from halfstep._autocast.region import Region
from halfstep._autocast.scopes import Settings
from halfstep._common.module_names import matching


@contextmanager
def changed(change: Callable[[Settings], Settings]) -> Iterator[None]:
    """Apply ``change`` to the settings of contexts that the user enters in this thread."""
    state = scopes.thread.state
    before, state.change = state.change, change
    try:
        yield
    finally:
        state.change = before


def settings_of(context: Region) -> Settings:
    return context._settings


def with_policy(settings: Settings, policy: Policy, *, only_observed: bool = False) -> Settings:
    """Return settings with another policy, which is prepared on their device.

    ``only_observed``: whether it is active only while ops are observed, which halves the time.
    """
    device = settings.switches.device
    return settings._replace(policy=kernels.prepare(policy, device, only_observed=only_observed))


def policy_of(settings: Settings) -> Policy | None:
    """Return the policy of settings, None if autocast is off or the rules are PyTorch's."""
    return None if settings.policy is None else kernels.prepared(settings.policy).policy


@contextmanager
def named(model: nn.Module | None, policy: Policy) -> Iterator[None]:
    """Name the modules that a policy has rules for, and restore the names after the block.

    Raises:
        ValueError: See :func:`halfstep._autocast.modules.name_modules`.
    """
    paths: dict[nn.Module, str] = {}
    if model is not None:
        for rule in policy.module_rules:
            for module in matching(model, rule.module or "", f"policy rule {rule}").values():
                paths[module] = module._path if isinstance(module, Wrapped) else ""
    try:
        name_modules(model, policy)
        yield
    finally:
        for module, path in paths.items():
            if isinstance(module, Wrapped):
                module._path = path
                unwrap(module)
