import torch
from torch.amp.grad_scaler import OptState

from prelude import loss_of, model_and_sgd, show

class ClosureGradScaler(torch.amp.GradScaler):
    def _force_scaler_ready(self, optimizer):
        optimizer_state = self._per_optimizer_states[id(optimizer)]
        optimizer_state["stage"] = OptState.READY
        optimizer_state["found_inf_per_device"] = {}

    def _unscale_grads(self, optimizer, state=None):
        if not self._enabled:
            return
        self._check_scale_growth_tracker("step")
        optimizer_state = self._per_optimizer_states[id(optimizer)]
        if optimizer_state["stage"] is OptState.STEPPED:
            raise RuntimeError("stepped")
        if optimizer_state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        assert len(optimizer_state["found_inf_per_device"]) > 0, (
            "No inf checks were recorded for this optimizer."
        )

    def step(self, optimizer, *args, **kwargs):
        closure = kwargs["closure"]

        def _amp_closure(**kwargs):
            self._force_scaler_ready(optimizer)
            loss = closure(**kwargs)
            self._unscale_grads(optimizer)
            optimizer_state = self._per_optimizer_states[id(optimizer)]
            found = sum(v.item() for v in optimizer_state["found_inf_per_device"].values())
            return None if found else loss

        retval = optimizer.step(closure=_amp_closure)
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        return retval

model, opt = model_and_sgd()
scaler = ClosureGradScaler("cpu", init_scale=1024.0)
for _ in range(4):

    def closure():
        opt.zero_grad()
        loss = loss_of(model)
        scaler.scale(loss).backward()
        return loss

    scaler.step(opt, closure=closure)
    scaler.update()
    print(scaler.get_scale())
show(model, scaler)
