# expect: parts[0]: float16 [2, 4], of line 13
# expect: weight of Bilinear

projection = nn.Bilinear(4, 4, 2)

def fuse(*parts, **options):
    return projection(*parts)  #!

fuse(half, x)
