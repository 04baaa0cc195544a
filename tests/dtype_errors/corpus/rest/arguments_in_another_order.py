# expect: target: int64 [5], of line #1
# cure: F.cross_entropy(logits, target)

model = nn.Linear(4, 3)
def loss_of(target, logits):
    return F.cross_entropy(target, logits)  #!
for _ in range(2):
    target = torch.randint(0, 3, (5,))  #1
    loss = loss_of(target, model(torch.randn(5, 4)))
    loss.backward()
