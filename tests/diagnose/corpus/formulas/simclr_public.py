# expect: pairs(out, y)
# gain: 1.0


def simclr_public(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=-1)
    sim_matrix = torch.exp(torch.mm(z, z.t().contiguous()) / 0.005)
    mask = (torch.ones_like(sim_matrix) - torch.eye(len(z), device=sim_matrix.device)).bool()
    sim_matrix = sim_matrix.masked_select(mask).view(len(z), -1)
    pos_sim = torch.exp(torch.sum(z * z.roll(8, 0), dim=-1) / 0.005)
    return (-torch.log(pos_sim / sim_matrix.sum(dim=-1))).mean()
