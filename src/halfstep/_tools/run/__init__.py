"""``halfstep run``: an unmodified training script under halfstep, with a record.

``session`` manages one run from start to end, ``launch`` handles launchers and folders, and
``stand_ins`` replaces the classes of ``torch.amp``. ``amp`` and its parts add mixed precision to a
script that has none.
"""
