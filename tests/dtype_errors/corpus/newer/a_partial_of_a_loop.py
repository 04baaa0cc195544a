# expect: h: float16 [2, 4]
# expect: weight of Linear: float32 [4, 4]
# missed: a cast to the dtype of each block

from functools import partial, reduce

blocks = [nn.Linear(4, 4).half(), nn.Linear(4, 4)]
run = partial(reduce, lambda h, block: block(h), blocks)  #!
run(half)
