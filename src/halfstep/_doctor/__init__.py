"""``halfstep doctor``: findings about objects, training scripts and the machine.

``doctor`` is the entry point, ``objects`` checks objects, and ``hardware`` measures the machine.
The ``read_`` modules parse source without running it, ``follow_iterations`` tracks iterations
along the paths through it, and the ``about_`` modules produce the findings.
"""
