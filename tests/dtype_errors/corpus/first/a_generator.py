# expect: h: float32 [2, 4]
# expect: weight of Linear: float16 [4, 4], a parameter

layers = [nn.Linear(4, 4), nn.Linear(4, 4).half()]

def activations(h):
    for layer in layers:
        h = layer(h)  #!
        yield h

for h in activations(x):
    print(h.shape)
