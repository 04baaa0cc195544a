# expect: tried, and it runs, in place of 

model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
hist = torch.zeros(2, dtype=torch.long)
for i in range(3):
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    out = model(x)
    loss = F.cross_entropy(out, y)
    opt.zero_grad(); loss.backward(); opt.step()
    with torch.no_grad():
        hist.add_(out.softmax(-1).sum(0))  #!
