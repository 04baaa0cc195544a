import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from prelude import loss_of, model_and_sgd, show

def unscale_custom(self, optimizer):
    if not self._enabled:
        return
    self._check_scale_growth_tracker("unscale_")
    state = self._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.UNSCALED:
        raise RuntimeError("twice")
    inv_scale = self._scale.double().reciprocal().float()
    found_inf = torch.full((), 0.0, dtype=torch.float32)
    state["found_inf_per_device"] = self._unscale_grads_(optimizer, inv_scale, found_inf, False)
    state["stage"] = OptState.UNSCALED

model, opt = model_and_sgd()
scaler = torch.amp.GradScaler("cpu")
for _ in range(4):
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    unscale_custom(scaler, opt)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(opt)
    scaler.update()
show(model, scaler)
