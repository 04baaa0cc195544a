"""``halfstep doctor``: findings about training scripts and the machine.

``doctor`` is the entry point, and ``hardware`` measures the machine.
The ``read_`` modules parse source without running it, and the ``about_`` modules produce the
findings; ``iteration`` is the state of an iteration at a point of the source.
"""
