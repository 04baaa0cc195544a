# expect: tried, and it runs, in place of 

def encode(x, n=4):
    out = [x]
    for i in range(n):
        for fn in (torch.sin, torch.cos):
            out.append(fn(2.0**i * x))
    return torch.cat(out, -1)

class NeRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(27, 16), nn.Linear(16, 16), nn.Linear(16 + 27, 16)])
        self.rgb, self.sigma = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x):
        h = x
        for i, layer in enumerate(self.layers):
            if i == 2:
                h = torch.cat([h, x], -1)
            h = F.relu(layer(h))  #!
        return self.rgb(h).sigmoid(), self.sigma(h).relu()

model = NeRF().half()
model.rgb.float()

def render(rays):
    rgb, sigma = model(encode(rays))
    w = 1 - torch.exp(-sigma.squeeze(-1) * 0.1)
    trans = torch.cumprod(torch.cat([torch.ones(len(w), 1), 1 - w[:, :-1]], 1), 1)
    return (trans[..., None] * w[..., None] * rgb).sum(1)

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    rays, target = torch.randn(4, 6, 3), torch.rand(4, 3)
    loss = F.mse_loss(render(rays), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
