# expect: tried, and it runs, in place of 

def make_loss(weight):
    def loss_fn(pred, target):
        err = (pred - target) @ weight  #!
        return err.square().mean()
    return loss_fn
net = nn.Linear(4, 3).half()
loss_fn = make_loss(torch.eye(3))
opt = torch.optim.SGD(net.parameters(), lr=.01)
for i in range(3):
    x = torch.randn(5, 4).half()
    loss = loss_fn(net(x), torch.zeros(5, 3).half())
    opt.zero_grad(); loss.backward(); opt.step()
