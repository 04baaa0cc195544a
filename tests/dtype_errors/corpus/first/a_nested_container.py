# expect: batch['vision'][0]['pixels']: float32 [2, 4], of line #1: batch =
# expect: weight of Linear

patch = nn.Linear(4, 4).half()

def collate(items):
    return {"vision": [{"pixels": torch.stack(items)}]}

batch = collate([x[0], x[1]])  #1
patch(batch["vision"][0]["pixels"])  #!
