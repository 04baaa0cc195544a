# expect: hist: int64 [2], of line #1
# incurable: a cast to int64 would round them to 0

model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
hist = torch.zeros(2, dtype=torch.long)  #1
for i in range(3):
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    out = model(x)
    loss = F.cross_entropy(out, y)
    opt.zero_grad(); loss.backward(); opt.step()
    with torch.no_grad():
        hist.add_(out.softmax(-1).sum(0))  #!
