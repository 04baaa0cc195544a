# thread: zichongli5/NorMuon 7
# expect: second: float32 [2, 1]
# expect: v_mean: bfloat16 [2, 1], of line #1

class Muon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["second"] = torch.zeros(p.shape[0], 1)
                update = p.grad
                second = state["second"]
                v_mean = update.square().mean(dim=-1, keepdim=True)  #1
                second.lerp_(v_mean, 1 - group["beta2"])  #!
                p.sub_(update / second.sqrt())

model = nn.Linear(4, 2, bias=False).bfloat16()
optimizer = Muon(model.parameters(), {"beta2": 0.9})
model(x.bfloat16()).sum().backward()
optimizer.step()
