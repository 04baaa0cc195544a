# expect: half: float16 [2, 4], of line 13

import warnings
warnings.simplefilter("ignore")
model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
model(half)  #!
