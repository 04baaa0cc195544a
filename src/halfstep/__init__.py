"""Automatic mixed precision for PyTorch that is safe, visible and editable.

It reimplements the interface of ``torch.amp``: change the import, keep the code.

>>> from halfstep import GradScaler, autocast
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfstep._version import __version__ as __version__

if TYPE_CHECKING:  # for editors and type checkers; `as` re-exports a name
    from torch.amp import is_autocast_available as is_autocast_available

    from halfstep import errors as errors
    from halfstep import sinks as sinks
    from halfstep._autocast import Policy as Policy
    from halfstep._autocast import Rule as Rule
    from halfstep._autocast import autocast as autocast
    from halfstep._autocast import custom_bwd as custom_bwd
    from halfstep._autocast import custom_fwd as custom_fwd
    from halfstep._autocast import keep as keep
    from halfstep._autocast import preset as preset
    from halfstep._autocast import use_policy as use_policy
    from halfstep._master_weights.lost_updates import lost_updates as lost_updates
    from halfstep._master_weights.master_weights import float32_weights as float32_weights
    from halfstep._master_weights.master_weights import master_weights as master_weights
    from halfstep._scaler import Dynamic as Dynamic
    from halfstep._scaler import GradScaler as GradScaler
    from halfstep._scaler import Guard as Guard
    from halfstep._scaler import Outcome as Outcome
    from halfstep._scaler import Reason as Reason
    from halfstep._scaler import Static as Static
    from halfstep._scaler import guard as guard
    from halfstep._tools.diagnose.diagnosis import Diagnosis as Diagnosis
    from halfstep._tools.record.record import record as record
    from halfstep._tools.trace.trace import trace as trace
    from halfstep._tools.tune.tuner import self_check as self_check
    from halfstep._tools.tune.tuner import tune as tune
    from halfstep._tools.watch.diagnose import diagnose as diagnose
    from halfstep.errors import CallOrderError as CallOrderError

_MODULES = {
    "CallOrderError": "halfstep.errors",
    "Diagnosis": "halfstep._tools.diagnose.diagnosis",
    "Dynamic": "halfstep._scaler",
    "GradScaler": "halfstep._scaler",
    "Guard": "halfstep._scaler",
    "Outcome": "halfstep._scaler",
    "Policy": "halfstep._autocast",
    "Reason": "halfstep._scaler",
    "Rule": "halfstep._autocast",
    "Static": "halfstep._scaler",
    "autocast": "halfstep._autocast",
    "custom_bwd": "halfstep._autocast",
    "custom_fwd": "halfstep._autocast",
    "diagnose": "halfstep._tools.watch.diagnose",
    "float32_weights": "halfstep._master_weights.master_weights",
    "guard": "halfstep._scaler",
    "is_autocast_available": "torch.amp",
    "keep": "halfstep._autocast",
    "lost_updates": "halfstep._master_weights.lost_updates",
    "master_weights": "halfstep._master_weights.master_weights",
    "preset": "halfstep._autocast",
    "record": "halfstep._tools.record.record",
    "self_check": "halfstep._tools.tune.tuner",
    "trace": "halfstep._tools.trace.trace",
    "tune": "halfstep._tools.tune.tuner",
    "use_policy": "halfstep._autocast",
}
"""Modules of the public names."""

if not TYPE_CHECKING:  # which see the names above
    __all__ = ["__version__", *_MODULES]

    def __getattr__(name: str) -> Any:
        """Import a public name, and only what it needs, when it is first used.

        Importing PyTorch takes seconds, and reading a record does not need it. Nor does training
        with autocast need doctor and tune.
        """
        if name in ("errors", "sinks"):
            return import_module(f"halfstep.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(["__version__", *_MODULES])
