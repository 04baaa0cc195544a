# expect: half: float16 [2, 4], of line 13
# expect: weight of Linear: float32
# expect: cuda
# expect: line #1

import warnings
warnings.simplefilter("ignore")
model = nn.Linear(4, 2)
with torch.autocast("cuda", torch.float16):  #1
    y = model(half)  #!
