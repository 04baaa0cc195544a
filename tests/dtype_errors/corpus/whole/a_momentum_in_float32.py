# expect: tried, and it runs, in place of 

class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, dict(lr=lr, beta=beta))
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if "m" not in st:
                    st["m"] = torch.zeros(p.shape)
                m, g = st["m"], p.grad
                u = torch.lerp(g, m, group["beta"]).sign()  #!
                p.add_(u, alpha=-group["lr"])
                m.lerp_(g, 0.01)

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).bfloat16()
opt = Lion(model.parameters())
for step in range(3):
    loss = model(torch.randn(8, 4).bfloat16()).float().pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
