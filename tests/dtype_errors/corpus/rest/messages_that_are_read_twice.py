# cure: message = message.to(torch.float32)

class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = nn.Linear(4, 4)

    def forward(self, h, place):
        message = F.relu(self.message(h))
        mean = torch.zeros_like(h).scatter_reduce(0, place, message, "mean")  #!
        top = h.clone()
        top.scatter_reduce_(0, place, message, reduce="amax")
        return mean + top

layers = nn.ModuleList(Passing() for _ in range(2))
with torch.autocast("cpu", dtype=torch.float16):
    h = x
    for layer in layers:
        h = layer(h, torch.zeros(2, 4, dtype=torch.long))
