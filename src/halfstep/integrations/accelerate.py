"""accelerate, and the Trainer of transformers: halfstep's GradScaler in an Accelerator."""

from __future__ import annotations

from halfstep import GradScaler
from halfstep.errors import CallOrderError
from halfstep.integrations import needs

with needs("accelerate"):
    from accelerate import Accelerator, DistributedType

_SCALE_BY_THEMSELVES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def use_scaler(accelerator: Accelerator, scaler: GradScaler | None = None) -> GradScaler:
    """Make an Accelerator scale with halfstep's GradScaler; call this before ``prepare``.

    ``accelerator.backward``, ``clip_grad_norm_``, the optimizers and ``save_state`` then use it. On
    a CPU, accelerate silently trains in float32 when ``"fp16"`` is requested; this call also
    enables float16 there. The policy is that of :class:`halfstep.use_policy` around the training.

    Args:
        accelerator: An Accelerator with ``mixed_precision="fp16"``; ``trainer.accelerator`` of a
            Trainer with ``fp16=True``, before ``train``.
        scaler: The scaler; by default a new one with the values of accelerate's
            ``GradScalerKwargs``.

    Returns:
        The scaler.

    Raises:
        CallOrderError: An optimizer has already been prepared, or, on a CPU, a model.
        TypeError: The scaler is not halfstep's.
        ValueError: The precision is not ``"fp16"``, or DeepSpeed or Megatron scales by itself.

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
    if isinstance(known, GradScaler) and scaler in (None, known):  # a repeated call
        return known
    # Prepared optimizers keep their scaler, and models their precision: float32 on a CPU.
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
    accelerator.native_amp = True  # accelerate sets False on a CPU
    return scaler
