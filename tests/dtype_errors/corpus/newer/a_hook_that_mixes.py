# thread: nestordemeure/ManifoldMixupV2 1
# expect: output: float16 [2, 4]
# expect: self.lam: float32 [2, 1], of line #1: self.lam

class Mixup:
    def __init__(self):
        self.lam = torch.tensor([[0.3], [0.7]])  #1

    def hook(self, module, args, output):
        return torch.lerp(output.flip(0), output, weight=self.lam)  #!

net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).half()
net[0].register_forward_hook(Mixup().hook)
net(half)
