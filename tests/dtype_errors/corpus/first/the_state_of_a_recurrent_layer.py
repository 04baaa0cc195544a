# expect: h0: float32 [1, 3], of line #1: h0, c0 =
# expect: weight_ih_l0 of LSTM: float16

lstm = nn.LSTM(4, 3).half()
h0, c0 = torch.zeros(1, 3), torch.zeros(1, 3)  #1
out, state = lstm(half, (h0, c0))  #!
