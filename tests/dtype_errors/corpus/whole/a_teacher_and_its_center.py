# expect: tried, and it runs, in place of 

student = nn.Linear(6, 3)
teacher = nn.Linear(6, 3).bfloat16()
centre = torch.zeros(3)
opt = torch.optim.SGD(student.parameters(), lr=0.1)

@torch.no_grad()
def update(m=0.9):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.data.lerp_(s.data, 1 - m)  #!

for step in range(4):
    x = torch.randn(8, 6)
    with torch.no_grad():
        target = teacher(x.bfloat16()).float()
        centre.lerp_(target.mean(0), 0.1)
    loss = F.mse_loss(student(x), target - centre)
    opt.zero_grad(); loss.backward(); opt.step()
    update()
