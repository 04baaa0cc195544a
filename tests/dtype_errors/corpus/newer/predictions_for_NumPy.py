# thread: locuslab/open-unlearning 156
# expect: logits.detach().cpu(): bfloat16 [2, 4]

def compute_metrics(logits, labels):
    preds = logits.argmax(-1)
    probs = logits.detach().cpu().numpy()  #!
    return probs

with torch.autocast("cpu", torch.bfloat16):
    logits = nn.Linear(4, 4)(x)  #1
compute_metrics(logits, None)
