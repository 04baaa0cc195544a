# expect: self.a: float32 [2, 4], of line 12: x =
# expect: self.b: bfloat16 [4, 2], of line #2: self.b

class Factor:
    def __init__(self, a):
        self.a = a  #1
        self.b = torch.randn(4, 2).bfloat16()  #2

    def product(self):
        return (self.a @ self.b).sum()  #!

Factor(x).product()
