# thread: flairNLP/flair 3651
# expect: counts: float16 [2, 3], of line #1
# expect: mask: float32 [2, 2], of line #2

class Embeddings(nn.Module):
    def lengths(self, hidden, word_ids):
        mask = (word_ids >= 0).float()  #2
        counts = torch.zeros(2, 3, dtype=hidden.dtype)  #1
        counts.scatter_add_(1, word_ids.clamp(min=0), mask)  #!
        return counts

Embeddings().lengths(half, torch.tensor([[0, 1], [1, -1]]))
