import math
from collections import defaultdict

import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from prelude import loss_of, model_and_sgd, show

class GradScaler(torch.cuda.amp.GradScaler):
    def __init__(
        self,
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        enabled=True,
        hysteresis=1,
    ):
        torch.amp.GradScaler.__init__(
            self,
            "cpu",
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.optimizer_update_skipped = None
        self.hysteresis = hysteresis
        self._hysteresis_tracker = hysteresis

    def _unscale_grads_(self, optimizer, *args):
        if getattr(optimizer, "_custom_amp_unscale_grads", False):
            return optimizer.unscale_grads(*args)
        return super()._unscale_grads_(optimizer, *args)

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        retval = None
        found_inf = torch.tensor(
            [sum(v.item() for v in optimizer_state["found_inf_per_device"].values())]
        )
        if found_inf.item() == 0:
            retval = optimizer.step(*args, **kwargs)
            self.optimizer_update_skipped = False
        else:
            self.optimizer_update_skipped = True
        return retval

    def update(self, new_scale=None):
        if not self._enabled:
            return
        _scale, _growth_tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            self._scale.fill_(new_scale)
        else:
            found_infs = [
                f.to(device=_scale.device)
                for state in self._per_optimizer_states.values()
                for f in state["found_inf_per_device"].values()
            ]
            assert len(found_infs) > 0
            found = found_infs[0]
            for f in found_infs[1:]:
                found += f
            if found > 0:
                self._hysteresis_tracker -= 1
                if self._hysteresis_tracker <= 0:
                    torch._amp_update_scale_(
                        _scale,
                        _growth_tracker,
                        found,
                        self._growth_factor,
                        self._backoff_factor,
                        self._growth_interval,
                    )
                else:
                    self._growth_tracker.fill_(0)
            else:
                self._hysteresis_tracker = self.hysteresis
                torch._amp_update_scale_(
                    _scale,
                    _growth_tracker,
                    found,
                    self._growth_factor,
                    self._backoff_factor,
                    self._growth_interval,
                )
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

model, opt = model_and_sgd()
scaler = GradScaler(growth_interval=3, hysteresis=2)
for i in range(12):
    opt.zero_grad()
    loss = scaler.scale(loss_of(model))
    loss.backward()
    if i in (3, 7, 8):
        model[0].weight.grad[0, 0] = math.inf
    scaler.step(opt)
    scaler.update()
    print(scaler.optimizer_update_skipped, scaler.get_scale())
show(model, scaler)
