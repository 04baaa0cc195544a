"""``halfstep doctor``: findings about the objects and the source of a training, and the machine.

``objects`` and ``source`` make findings, ``hardware`` measures. The ``read_`` files read source
without running it, and the ``about_`` files check what was read.
"""
