# expect: tried, and it runs, in place of 

teacher = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4)).to(torch.bfloat16).eval()
student = nn.Linear(5, 4)
proj = nn.Linear(16, 4)
opt = torch.optim.Adam([*student.parameters(), *proj.parameters()])
for i in range(3):
    x = torch.randn(8, 5)
    with torch.no_grad():
        feat = teacher[1](teacher[0](x))  #!
        t = teacher[2](feat)
    s = student(x)
    kd = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")
    hint = F.huber_loss(proj(feat), s)
    loss = kd + hint
    opt.zero_grad(); loss.backward(); opt.step()
