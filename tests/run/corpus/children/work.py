# What processes of a program do.


def train(steps, make_worse=False, has_scaler=True):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=has_scaler)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(2, 4)).square().mean()
            if make_worse:
                loss = (loss - 9).log()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(steps, model.weight.sum().item(), flush=True)


def train_badly(steps):
    train(steps, make_worse=True)


def train_to_nan(steps):
    train(steps, make_worse=True, has_scaler=False)


def dtype(steps):
    import torch

    with torch.autocast("cpu", torch.bfloat16):
        print(torch.ones(2, 2, dtype=torch.bfloat16).softmax(0).dtype, flush=True)
