# expect: half: float16 [2, 4], of line 13
# expect: float32 [4, 4]
# missed: the weight, and a cure

import warnings
warnings.simplefilter("ignore")
scripted = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x)
y = scripted(half)  #!
