# expect: noise_pred: float16 [2, 4], of line #1
# expect: noise: float32 [2, 4], of line #2

model = nn.Linear(4, 4).half()
noise = torch.randn(2, 4)  #2
noise_pred = model(half)  #1
loss = F.huber_loss(noise_pred, noise, reduction="mean")
loss.backward()  #!
