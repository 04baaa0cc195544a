# expect: input: float64 [4, 6]
# cure: model(join(batch).to(torch.float32))

model = nn.Linear(6, 2)
def join(batch):
    return torch.cat([batch[key] for key in ("a", "b")], 1)
def predict(batch):
    return model(join(batch))  #!
for _ in range(2):
    predict({"a": torch.randn(4, 3).double(), "b": torch.randn(4, 3)})
