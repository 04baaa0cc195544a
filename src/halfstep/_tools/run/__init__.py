"""``halfstep run``: an unmodified training script under halfstep, with a record.

``session`` manages one run from start to end, ``launch`` makes folders and executes the script, and
``stand_ins`` replaces the classes of ``torch.amp``. ``amp`` and its parts add mixed precision to a
script that has none.
"""
