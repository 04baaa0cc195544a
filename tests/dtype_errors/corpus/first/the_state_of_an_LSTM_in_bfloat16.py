# expect: state: float32 [1, 2, 4], of line #1
# expect: weight_ih_l0 of LSTM: bfloat16 [16, 4]
# cure: state.to(torch.bfloat16)

model = nn.LSTM(4, 4).bfloat16()
state = torch.zeros(1, 2, 4)  #1
model(torch.ones(3, 2, 4).bfloat16(), (state, state))  #!
