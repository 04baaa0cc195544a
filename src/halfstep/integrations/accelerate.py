"""accelerate: halfstep's GradScaler in an Accelerator, and its log as a sink."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep import GradScaler
from halfstep.errors import CallOrderError
from halfstep.integrations import needs
from halfstep.sinks import prefixed

with needs("accelerate"):
    from accelerate import Accelerator, DistributedType

_SCALE_BY_THEMSELVES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def use_scaler(accelerator: Accelerator, scaler: GradScaler | None = None) -> GradScaler:
    """Let an Accelerator scale with halfstep's GradScaler; call it before ``prepare``.

    ``accelerator.backward``, ``clip_grad_norm_``, the optimizers and ``save_state`` then use it. On
    a CPU, where accelerate trains in float32 if it is asked for ``"fp16"``, and does not say so, it
    also switches float16 on.

    The policy is that of :class:`halfstep.use_policy` around the training.

    Args:
        accelerator: Made with ``mixed_precision="fp16"``.
        scaler: The scaler; left out, a new one with the numbers of accelerate's
            ``GradScalerKwargs``.

    Returns:
        The scaler.

    Raises:
        CallOrderError: An optimizer has been prepared; or, on a CPU, a model.
        TypeError: The scaler is not halfstep's.
        ValueError: The precision is another one, or DeepSpeed or Megatron scale by themselves.

    Sync: none.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(mixed_precision="fp16", cpu=True)
        >>> use_scaler(accelerator).get_scale()
        65536.0
    """
    if not (scaler is None or isinstance(scaler, GradScaler)):
        raise TypeError(f"use_scaler(scaler={scaler!r}): pass a halfstep.GradScaler")
    if accelerator.distributed_type in _SCALE_BY_THEMSELVES:
        raise ValueError(f"use_scaler: {accelerator.distributed_type.value} scales by itself")
    if accelerator.mixed_precision != "fp16":
        raise ValueError(
            f"use_scaler: mixed_precision is {accelerator.mixed_precision!r}, and accelerate "
            "scales with 'fp16' only. To skip steps that are not finite without a scale: "
            "halfstep.guard(optimizer)"
        )
    known = accelerator.scaler
    if isinstance(known, GradScaler) and scaler in (None, known):  # the call is made again
        return known
    # Optimizers know the scaler, and models the precision, which is float32 on a CPU until now.
    if accelerator._optimizers or (accelerator._models and not accelerator.native_amp):
        raise CallOrderError(
            "use_scaler: prepare() has been called, and what it returned knows the scaler and the "
            "precision from before; call use_scaler(accelerator) first, a Trainer's in its "
            "create_accelerator_and_postprocess()"
        )
    if scaler is None:
        numbers = accelerator.scaler_handler
        scaler = GradScaler(**({} if numbers is None else numbers.to_kwargs()))
    accelerator.scaler = scaler
    accelerator.native_amp = True  # False on a CPU
    return scaler


class AcceleratorSink:
    """A sink of :class:`halfstep.record`: what it takes, ``accelerator.log`` gets.

    Args:
        accelerator: One whose trackers were started (``init_trackers``); there are none before.

    Example:
        >>> from accelerate import Accelerator
        >>> sink = AcceleratorSink(Accelerator(mixed_precision="fp16", cpu=True))
        >>> sink.log(1, {"scale": 65536.0})
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars under ``halfstep/``."""
        self._accelerator.log(prefixed(scalars), step=step)
