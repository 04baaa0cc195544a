# expect: tried, and it runs, in place of 

def mel(wave):
    spec = torch.stft(wave, 16, 8, window=torch.hann_window(16), return_complex=True).abs()
    return torch.log10(spec.clamp(min=1e-6))
class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.n, self.l = nn.Conv1d(9, 8, 3, padding=1), nn.LayerNorm(8), nn.Linear(8, 4)
    def forward(self, m):
        h = F.gelu(self.c(m)).transpose(1, 2)  #!
        return self.l(self.n(h).mean(1))
model = Enc().half()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    wave, y = torch.randn(2, 64), torch.randint(0, 4, (2,))
    loss = F.cross_entropy(model(mel(wave)).float(), y)
    opt.zero_grad(); loss.backward(); opt.step()
