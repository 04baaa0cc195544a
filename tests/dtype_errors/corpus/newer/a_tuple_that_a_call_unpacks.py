# expect: embedded: float32 [2, 4], of line #1
# expect: weight of Linear: float16 [4, 4]

def encode(ids):
    return nn.Embedding(8, 4)(ids), nn.Linear(4, 4).half()

embedded, proj = encode(torch.tensor([1, 2]))  #1
logits = proj(*[embedded])  #!
