# expect: float32 [2, 4]
# expect: 1.weight of Sequential: float16 [4, 4]
# incurable

def upcast(module, args):
    return tuple(a.float() for a in args)  #1

layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
layers[1].register_forward_pre_hook(upcast)
layers(half)  #!
