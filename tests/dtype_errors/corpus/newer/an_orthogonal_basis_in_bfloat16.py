# thread: HomebrewML/HeavyBall 57
# expect: power: bfloat16 [4, 4], of line #2: power = gg @ basis

def orthogonalize(gg, basis):
    estimate = torch.einsum("ij,ij->j", basis, gg @ basis)
    order = torch.argsort(estimate, descending=True)
    basis = basis[:, order]  #1
    power = gg @ basis  #2
    basis, _ = torch.linalg.qr(power)  #!
    return basis

grad = torch.randn(4, 4).bfloat16()
orthogonalize(grad @ grad.T, torch.eye(4).bfloat16())
