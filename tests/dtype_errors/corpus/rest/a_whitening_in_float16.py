# expect: tried, and it runs, in place of 

class Whiten(nn.Module):
    def forward(self, x):
        x = x - x.mean(0)
        cov = x.t() @ x / (len(x) - 1) + 0.1 * torch.eye(x.shape[1], dtype=x.dtype)
        root = torch.linalg.cholesky(cov)  #!
        inv = torch.linalg.inv(root)
        return x @ inv.t()

model = nn.Sequential(nn.Linear(8, 4), Whiten(), nn.Linear(4, 2)).half()

optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    x, y = torch.randn(32, 8).half(), torch.randint(0, 2, (32,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
