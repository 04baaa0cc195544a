# expect: tried, and it runs, in place of 

critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(critic.parameters())
def gp(real, fake):
    e = torch.rand(len(real), 1)
    mix = (e * real + (1 - e) * fake).requires_grad_()
    g, = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)
    return (g.norm(dim=1) - 1).square().mean()
for i in range(3):
    real, fake = torch.randn(4, 3).double(), torch.randn(4, 3)
    loss = critic(fake).mean() - critic(real).mean() + gp(real, fake)  #!
    opt.zero_grad(); loss.backward(); opt.step()
