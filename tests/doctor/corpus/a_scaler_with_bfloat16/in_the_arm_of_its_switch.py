import torch
def train(model, batches, optimizer, scaler, use_bfloat16):
    is_low = use_bfloat16
    for x in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=use_bfloat16):  # expect: scaler-with-bf16
            loss = model(x)
        if is_low:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
