"""Ways in which public training code uses scalers and autocast: ``python idioms.py NAME``.

Each is a program of our own. :mod:`tests.run.test_idioms` runs it with and without halfstep.
"""

import copy
import io
import math
import pickle
import sys
from collections import defaultdict

import torch
from torch import nn
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

torch.manual_seed(0)
X = torch.randn(8, 4)


def model_and_sgd(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def loss_of(model, x=X):
    return model(x).square().mean()


def show(model, scaler):
    weights = sum(p.double().sum().item() for p in model.parameters())
    print(weights, scaler.get_scale(), scaler.state_dict().get("_growth_tracker"))


def kohya():
    model, opt = model_and_sgd(torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    org = scaler._unscale_grads_

    def replacer(optimizer, inv_scale, found_inf, allow_fp16):
        return org(optimizer, inv_scale, found_inf, True)

    scaler._unscale_grads_ = replacer
    for _ in range(6):
        opt.zero_grad()
        scaler.scale(loss_of(model, X.half()).float()).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
    show(model, scaler)


def nemo():
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


def nanochat():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu")
    for i in range(6):
        scaler.scale(loss_of(model)).backward()
        if i == 2:
            model[0].weight.grad[0, 0] = math.nan
        scaler.unscale_(opt)
        for v in scaler._found_inf_per_device(opt).values():
            v.mul_(1)
        scaler.step(opt)
        scaler.update()
        model.zero_grad(set_to_none=True)
        print(scaler.get_scale())
    show(model, scaler)


def min_scale():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for i in range(6):
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if i > 1:
            model[0].weight.grad[0, 0] = math.inf
        scaler.step(opt)
        scaler.update()
        if scaler._scale < 128:
            scaler._scale = torch.tensor(128.0).to(scaler._scale)
        print(scaler.get_scale())
    show(model, scaler)


def sam():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def first():
        for p in model.parameters():
            p.e = p.grad * 0.01
            p.data.add_(p.e)
        opt.zero_grad()

    def second():
        for p in model.parameters():
            p.data.sub_(p.e)
        opt.step()
        opt.zero_grad()

    for _ in range(4):
        scaler.scale(loss_of(model)).backward()
        state = scaler._per_optimizer_states[id(opt)]
        scaler.unscale_(opt)
        if not sum(v.item() for v in state["found_inf_per_device"].values()):
            first()
        state["stage"] = 2
        scaler.update()
        scaler.scale(loss_of(model)).backward()
        state = scaler._per_optimizer_states[id(opt)]
        scaler.unscale_(opt)
        if not sum(v.item() for v in state["found_inf_per_device"].values()):
            second()
        state["stage"] = 2
        scaler.update()
        print(scaler.get_scale())
    show(model, scaler)


def composer():
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


def custom_unscale():
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


def fp32scaler():
    class FP32Scaler(torch.amp.GradScaler):
        def scale(self, loss):
            return loss

        def step(self, optimizer):
            norm = torch.norm(
                torch.stack([p.grad.norm() for g in optimizer.param_groups for p in g["params"]])
            )
            if norm.isfinite():
                optimizer.step()

        def update(self):
            pass

    model, opt = model_and_sgd()
    scaler = FP32Scaler("cpu")
    for _ in range(4):
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(opt)
        scaler.update()
    show(model, scaler)


def disabled_subclass():
    class Mine(torch.amp.GradScaler):
        def __init__(self, on):
            super().__init__("cpu", enabled=on)
            self.n = 0

        def step(self, optimizer, *a, **k):
            self.n += 1
            return super().step(optimizer, *a, **k)

    model, opt = model_and_sgd()
    scaler = Mine(False)
    for _ in range(3):
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    print(scaler.n, scaler.is_enabled(), scaler.state_dict())
    show(model, scaler)


def guarded_step():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu")
    for i in range(8):
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if i in (2, 5):
            model[0].weight.grad[0, 0] = math.inf
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            scaler.step(opt)
        else:
            print("skip")
        scaler.update()
        print(scaler.get_scale())
    show(model, scaler)


def scale_watch():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    sched = torch.optim.lr_scheduler.StepLR(opt, 2)
    for i in range(8):
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if i in (3, 4):
            model[0].weight.grad[0, 0] = math.inf
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        if not before > scaler.get_scale():
            sched.step()
        print(scaler.get_scale(), sched.get_last_lr())
    show(model, scaler)


def collapse():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu")
    for i in range(40):
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if 2 < i < 34:
            model[0].weight.grad[0, 0] = math.inf
        scaler.step(opt)
        scaler.update()
        print(scaler.get_scale())
    show(model, scaler)


def nan_losses():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    for i in range(14):
        opt.zero_grad()
        loss = loss_of(model)
        if i in (2, 3, 6, 11):
            loss = loss * math.nan
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        print(scaler.get_scale(), scaler._get_growth_tracker())
    show(model, scaler)


def checkpoints():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    for _ in range(3):
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(opt)
        scaler.update()
    state = scaler.state_dict()
    print(
        {
            k: state[k]
            for k in (
                "scale",
                "growth_factor",
                "backoff_factor",
                "growth_interval",
                "_growth_tracker",
            )
        }
    )
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(loaded)
    third = copy.deepcopy(other)
    fourth = pickle.loads(pickle.dumps(scaler))
    for s in (other, third, fourth):
        for _ in range(4):
            opt.zero_grad()
            s.scale(loss_of(model)).backward()
            s.step(opt)
            s.update()
        show(model, s)


def gan():
    g, og = model_and_sgd()
    d, od = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu")
    for i in range(5):
        od.zero_grad()
        scaler.scale(loss_of(d) + loss_of(g).detach()).backward()
        scaler.step(od)
        scaler.update()
        og.zero_grad()
        scaler.scale(loss_of(g) * loss_of(d)).backward()
        if i == 2:
            g[0].weight.grad[0, 0] = math.inf
        scaler.step(og)
        scaler.update()
        print(scaler.get_scale())
    show(g, scaler)
    show(d, scaler)


def accumulate():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu")
    for i in range(12):
        scaler.scale(loss_of(model, X[i % 8][None]) / 3).backward()
        if (i + 1) % 3 == 0:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    show(model, scaler)


def unscale_then_more():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(4):
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(opt)
        scaler.scale(loss_of(model)).backward()  # a mistake that PyTorch does not see
        scaler.step(opt)
        scaler.update()
    show(model, scaler)


def two_cadences():
    generator, often = model_and_sgd()
    critic, rarely = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for i in range(9):
        often.zero_grad()
        scaler.scale(loss_of(generator) + loss_of(critic)).backward()
        scaler.step(often)
        if i % 3 == 0:
            scaler.step(rarely)  # divides what was accumulated at two scales by the newest one
            rarely.zero_grad()
        scaler.update()
    show(generator, scaler)
    show(critic, scaler)


def clip_scaled():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu")
    for i in range(8):
        opt.zero_grad()
        scaler.scale(loss_of(model, X[i])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
    show(model, scaler)


def step_twice_in_turn():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(4):
        opt.zero_grad()
        loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.step(opt)
        try:
            scaler.step(opt)
        except RuntimeError:
            print("RuntimeError")
        scaler.update()
        try:
            scaler.update()
        except (AssertionError, RuntimeError):
            print("update twice")
    show(model, scaler)


def autocast_forms():
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def f(m, x):
        return m(x)

    @torch.cuda.amp.autocast(enabled=False)
    def g(m, x):
        return m(x)

    model, _ = model_and_sgd()
    print(f(model, X).dtype, g(model, X).dtype)
    with torch.autocast(device_type="cpu", enabled=False):
        print(model(X).dtype)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        print(model(X).sum().item())
    with torch.cpu.amp.autocast():
        print(model(X).dtype, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    ctx = torch.amp.autocast("cpu", dtype=torch.bfloat16)
    ctx.__enter__()
    y = model(X)
    ctx.__exit__(None, None, None)
    print(y.dtype)
    with ctx, ctx:
        print(model(X).dtype)
    torch.set_autocast_enabled("cpu", True)
    print(model(X).dtype)
    torch.set_autocast_enabled("cpu", False)
    print(
        isinstance(torch.amp.GradScaler("cpu"), torch.amp.GradScaler),
        isinstance(ctx, torch.autocast),
        issubclass(torch.cpu.amp.autocast, torch.autocast),
    )


def autocast_cuda0():
    model, _ = model_and_sgd()
    try:
        with torch.autocast("cuda:0", dtype=torch.float16):
            print(model(X).dtype)
    except RuntimeError as e:
        print("RuntimeError", str(e)[:60])
    try:
        with torch.autocast("cuda", dtype=torch.float16):
            print(model(X).dtype)
    except RuntimeError as e:
        print("RuntimeError", str(e)[:60])
    with torch.autocast("cpu", dtype=torch.float32):
        print(model(X).dtype)
    with torch.autocast("cpu", dtype=torch.float64):
        print(model(X).dtype)


def export():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 2)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)

    for strict in (False, True):
        ep = torch.export.export(M(), (X,), strict=strict)
        print(ep.module()(X).dtype)


def compiled():
    model, _ = model_and_sgd()

    @torch.compile(backend="eager")
    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    print(f(X).dtype, f(X).sum().item())


def tensor_scale():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu")
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scaler.step(opt)
    scaler.update(new_scale=torch.tensor(64.0))
    print(scaler.get_scale())
    opt.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scaler.step(opt)
    scaler.update(32.0)
    print(scaler.get_scale())
    print(scaler.scale([torch.ones(2), (torch.ones(()),)]))
    print(scaler._scale, scaler._growth_tracker, scaler._init_scale, scaler._growth_interval)
    show(model, scaler)


def tiny_scale():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-2)
    for _ in range(5):
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(opt)
        scaler.update()
    show(model, scaler)


def fused():
    torch.manual_seed(0)
    model, _ = model_and_sgd()
    opt = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    for i in range(10):
        opt.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if i in (3, 4):
            model[0].weight.grad[0, 0] = math.inf
        scaler.step(opt)
        scaler.update()
        print(scaler.get_scale())
    show(model, scaler)


def grad_penalty():
    model, opt = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(4):
        opt.zero_grad()
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x).float().mean()
        g = torch.autograd.grad(scaler.scale(out), x, create_graph=True)[0]
        g = g / scaler.get_scale()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (g.norm() - 1) ** 2 + out
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    show(model, scaler)


def multi_loss():
    m1, o1 = model_and_sgd()
    m2, o2 = model_and_sgd()
    scaler = torch.amp.GradScaler("cpu")
    for i in range(4):
        o1.zero_grad()
        o2.zero_grad()
        a, b = loss_of(m1), loss_of(m2)
        scaler.scale(a + 2 * b).backward(retain_graph=True)
        scaler.scale(a * b).backward()
        if i == 2:
            m1[0].weight.grad[0, 0] = math.inf
        scaler.unscale_(o1)
        scaler.step(o1)
        scaler.step(o2)
        scaler.update()
        print(scaler.get_scale())
    show(m1, scaler)
    show(m2, scaler)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
