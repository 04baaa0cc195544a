# expect: tried, and it runs, in place of 

model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).bfloat16()

def spectrum(x):
    f = torch.fft.rfft(x)  #!
    return torch.log1p(f.abs())

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    x = torch.randn(4, 30).bfloat16()
    h = spectrum(x)
    loss = model(h).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("END", loss.item())
