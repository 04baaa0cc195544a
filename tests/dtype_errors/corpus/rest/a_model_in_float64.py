# expect: batch['x']: float32 [8, 4]

model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
gate = nn.Linear(4, 1).double()
optimizer = torch.optim.SGD([*model.parameters(), *gate.parameters()], lr=0.1)
batches = [{"x": torch.randn(8, 4), "y": torch.randn(8)} for _ in range(3)]
for batch in batches:
    out = model(batch["x"]) * gate(batch["x"]).sigmoid()  #!
    loss = F.mse_loss(out.squeeze(1), batch["y"]) + 0.1 * (out - gate(batch["x"])).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
