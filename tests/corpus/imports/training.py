# What training uses.
import torch
import halfstep

halfstep.errors, halfstep.sinks
for dtype in (torch.float16, torch.bfloat16):
    model = torch.nn.Linear(4, 1, dtype=None if dtype == torch.float16 else dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0, enabled=dtype == torch.float16)
    if not scaler.is_enabled():
        halfstep.master_weights(optimizer)
        halfstep.guard(optimizer, max_norm=1.0)
    with halfstep.use_policy("standard"), halfstep.lost_updates(optimizer) as lost:
        with halfstep.autocast("cpu", dtype, policy="standard; softmax:lower"):
            loss = model(torch.ones(2, 4, dtype=model.weight.dtype)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert lost.share == 0.0
assert not any(name.startswith("halfstep._tools") for name in sys.modules)
