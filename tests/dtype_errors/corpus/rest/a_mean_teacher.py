# expect: tried, and it runs, in place of 

student = model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
teacher = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)).half().eval()

def consistency(x):
    with torch.no_grad():
        t = teacher(x).softmax(-1)  #!
    s = student(x).log_softmax(-1)
    return F.kl_div(s, t.float(), reduction="batchmean")

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
    loss = F.cross_entropy(student(x), y) + consistency(x + 0.1 * torch.randn_like(x))
    with torch.no_grad():
        for a, b in zip(teacher.parameters(), student.parameters()):
            a.lerp_(b, 0.01)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
