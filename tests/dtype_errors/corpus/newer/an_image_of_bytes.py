# thread: Deci-AI/super-gradients 1073
# expect: img: uint8 [1, 3, 4, 4], of line #1: img =
# expect: 0.weight of Sequential: float32

import numpy as np

def preprocess(image):
    image = image.transpose(2, 0, 1)[None]
    return torch.from_numpy(np.ascontiguousarray(image))

model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)).eval()
img = preprocess(np.zeros((4, 4, 3), dtype=np.uint8))  #1
pred = model(img)[0]  #!
