# expect: scores: float32 [2, 4], of line #2: (scores :=
# expect: table: bfloat16 [4, 3], of line #1

@contextmanager
def loaded():
    yield torch.ones(4, 3, dtype=torch.bfloat16)

with loaded() as table:  #1
    if (scores := x * 2) is not None:  #2
        torch.mm(scores, table)  #!
