# expect: float16 [3, 4], of line #2: packed
# expect: weight_ih_l0 of LSTM: float32

from torch.nn.utils.rnn import pack_padded_sequence

lstm = nn.LSTM(4, 3, batch_first=True)
embedded = nn.Embedding(8, 4).half()(torch.tensor([[1, 2], [3, 0]]))  #1
packed = pack_padded_sequence(embedded, [2, 1], batch_first=True)  #2
output, state = lstm(packed)  #!
