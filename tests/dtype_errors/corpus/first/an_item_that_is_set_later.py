# expect: batch['image']: bfloat16 [2, 4]$
# expect: weight of Linear: float32

batch = {"image": x}  #1
batch["mask"] = torch.ones(2, 4)
batch["image"] = batch["image"].bfloat16()
nn.Linear(4, 2)(batch["image"])  #!
