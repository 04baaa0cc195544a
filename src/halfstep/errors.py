"""Errors and warnings of halfstep.

A wrong value raises ``ValueError`` and a wrong type ``TypeError``, as usual in Python. The package
adds:

* ``RuntimeError``

  * :class:`CallOrderError`: a call is valid, but not now (``step`` twice, ``update`` before
    ``step``, ...). The object remains usable.

    * :class:`NothingCheckedError`: ``step`` or ``update`` of a ``GradScaler`` without any gradient.
      Also an ``AssertionError``, as in PyTorch.

  * :class:`SkippedStepsError`: a ``GradScaler`` skipped too many steps in a row.
  * :class:`RanksError`: the ranks of a job disagree, cannot agree, or do not answer.

* ``ValueError``

  * :class:`RecordError`: the files of a recorded run are missing or cannot be read.

* ``UserWarning``

  * :class:`HalfstepWarning`: every warning of the package, for a filter.

    * :class:`SkippedStepsWarning`: steps are being skipped, and training continues.
    * :class:`DiagnosisWarning`: a diagnosis found the op that made a step go wrong.

A few internal exceptions are not listed: halfstep always catches them.
"""


class CallOrderError(RuntimeError):
    """A method was called at a time when it cannot work.

    The message names the object, the earlier calls, and what to call instead. Nothing was changed:
    the caller can continue with the correct call.
    """


class NothingCheckedError(CallOrderError, AssertionError):
    """A step without gradients, or the end of an iteration without a step.

    PyTorch raises ``AssertionError`` ("No inf checks were recorded"), which existing code expects.
    """


class SkippedStepsError(RuntimeError):
    """Too many consecutive steps were skipped, and the user requested an error.

    The message gives the number of steps and the reason, names the parameters, and suggests
    remedies. The scaler remains usable: the iteration has ended as after any skipped step.
    """


class RanksError(RuntimeError):
    """The ranks of a job disagree on the scale, cannot be found, or do not respond.

    The message says which rank has which state, or which call waited for which rank. No step was
    taken, unless the message says that the states differed some updates ago.
    """


class RecordError(ValueError):
    """The files of a recorded run cannot be read; the message names the file and the cure."""


class HalfstepWarning(UserWarning):
    """The base class of halfstep's warnings.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("error", category=HalfstepWarning)
    """


class SkippedStepsWarning(HalfstepWarning):
    """Steps are skipped at the smallest scale too, or too many in a row were skipped."""


class DiagnosisWarning(HalfstepWarning):
    """A step went bad; the message names the op, the module, the line, the cause and the cure."""
