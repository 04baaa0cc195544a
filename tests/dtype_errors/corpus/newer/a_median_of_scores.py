# expect: scores.flatten(): bfloat16 [8]

def threshold(scores, q=0.9):
    return torch.quantile(scores.flatten(), q)  #!

with halfstep.autocast("cpu", torch.bfloat16):
    h = nn.Linear(4, 4)(x)  #1
threshold(h)
