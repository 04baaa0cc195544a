"""``halfstep doctor``: findings about the objects and the source of a training, and the machine.

``doctor`` and ``objects`` make findings, ``hardware`` measures. The ``read_`` files read source
without running it, ``follow_iterations`` follows the ways through it, and the ``about_`` files
check what was found there.
"""
