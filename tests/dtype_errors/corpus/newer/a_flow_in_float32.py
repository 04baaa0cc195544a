# thread: pytorch/pytorch 42218
# expect: image: float16 [1, 1, 4, 4], of line #1
# expect: grid: float32 [1, 4, 4, 2], of line #2

class Warp(nn.Module):
    def forward(self, image, flow):
        grid = self.base(flow) + flow.permute(0, 2, 3, 1)  #2
        return F.grid_sample(image, grid, align_corners=False)  #!

    def base(self, flow):
        theta = torch.eye(2, 3)[None]
        return F.affine_grid(theta, [1, 1, 4, 4], align_corners=False)

image = nn.Conv2d(1, 1, 1).half()(torch.rand(1, 1, 4, 4).half())  #1
Warp()(image, torch.zeros(1, 2, 4, 4))
