# expect: batch: float32 [2, 4], of line 12: x =
# expect: weight of Linear: float16
# expect: thread

model = nn.Linear(4, 4).half()

def forward(batch):
    return model(batch)  #!

with torch.autocast("cpu", torch.float16):
    with ThreadPoolExecutor(1) as pool:
        print(list(pool.map(forward, [x])))
