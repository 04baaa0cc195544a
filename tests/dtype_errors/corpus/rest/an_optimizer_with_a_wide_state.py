# expect: tried, and it runs, in place of 

class Ortho(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p, dtype=torch.float32)
                state["m"].lerp_(p.grad, 0.1)  #!
                update = state["m"]
                if p.ndim == 2:
                    a = update @ p.t()
                    update = update - 0.01 * a @ p
                p.add_(update, alpha=-group["lr"])

model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).bfloat16()
optimizer = Ortho(model.parameters(), lr=0.01)
for step in range(3):
    loss = model(torch.randn(4, 6).bfloat16()).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
