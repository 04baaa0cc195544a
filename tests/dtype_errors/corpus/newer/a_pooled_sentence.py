# expect: mask.unsqueeze(1): float32 [2, 1, 2]
# expect: tokens: float16 [2, 2, 4], of line #1

def mean_pooling(output, attention_mask):
    tokens = output[0]
    mask = attention_mask.float()  #2
    return torch.bmm(mask.unsqueeze(1), tokens).squeeze(1) / mask.sum(1, keepdim=True)  #!

output = (nn.Embedding(8, 4).half()(torch.tensor([[1, 2], [3, 0]])),)  #1
mean_pooling(output, torch.tensor([[1, 1], [1, 0]]))
