"""Running an unmodified training script with halfstep in place of ``torch.amp``, and recorded.

``script`` executes a target as Python itself does. ``stand_ins`` are the classes that take the
place of PyTorch's, ``replacements`` puts them under all their names. ``launch`` knows of ranks,
launchers and folders, and ``session`` is one run from start to end.
"""
