import torch
while True:
    prompt = input()
    with torch.no_grad(), torch.autocast("cuda", torch.float16):
        print(model(tokens(prompt)))
