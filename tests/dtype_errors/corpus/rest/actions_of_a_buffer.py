# expect: actions.unsqueeze(1): float32 [4, 1], of line
# cure: actions.unsqueeze(1).long()

buffer = torch.zeros(4, 6)
buffer[:, :4], buffer[:, 4] = torch.randn(4, 4), torch.tensor([0.0, 1, 1, 0])
net = nn.Linear(4, 2)
for _ in range(2):
    states, actions, rewards = buffer[:, :4], buffer[:, 4], buffer[:, 5]  #1
    q = net(states).gather(1, actions.unsqueeze(1)).squeeze(1)  #!
    F.smooth_l1_loss(q, rewards).backward()
