# expect: outputs['pred_boxes'].flatten(0, 1): float16 [2, 4]
# expect: boxes: float32 [3, 4], of line #2

class Matcher(nn.Module):
    def forward(self, outputs, targets):
        boxes = torch.cat([t["boxes"] for t in targets])  #2
        cost = torch.cdist(outputs["pred_boxes"].flatten(0, 1), boxes, p=1)  #!
        return cost

outputs = {"pred_boxes": nn.Linear(4, 4).half()(half)[None]}  #1
Matcher()(outputs, [{"boxes": torch.rand(1, 4)}, {"boxes": torch.rand(2, 4)}])
