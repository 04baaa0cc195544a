# thread: jenellefeather/model_metamers_pytorch 12
# expect: image_features: float16 [2, 4], of line #1: image_f
# expect: weights: float32 [4, 3], of line #3

import io

buffer = io.BytesIO()
torch.save({"text_features": torch.randn(3, 4)}, buffer)
buffer.seek(0)

def zeroshot(visual, images, weights):
    image_features = visual(images)  #1
    image_features /= image_features.norm(dim=-1, keepdim=True)  #2
    return 100.0 * image_features @ weights  #!

cache = torch.load(buffer)  #3
with torch.no_grad():
    zeroshot(nn.Linear(4, 4).half(), half, cache["text_features"].t())
