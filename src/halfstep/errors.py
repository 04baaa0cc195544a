"""The errors and warnings of halfstep, all in one place.

A wrong value raises ``ValueError`` and a wrong type ``TypeError``, as everywhere in Python. The
package adds:

* ``RuntimeError``

  * :class:`CallOrderError`: the call itself is fine, but not now (``step`` twice, ``update`` before
    ``step``, ...). The object stays usable.

    * :class:`NothingCheckedError`: ``step`` or ``update`` of a ``GradScaler`` without any gradient.
      Also an ``AssertionError``, as in PyTorch.

  * :class:`SkippedStepsError`: a ``GradScaler`` skipped too many steps in a row.
  * :class:`RanksError`: the ranks of a job disagree, cannot agree, or do not answer.

* ``ValueError``

  * :class:`RecordError`: the files of a recorded run are missing or cannot be read.
  * :class:`DemoError`: ``halfstep demo`` cannot use a setting, a text or an output folder.

* ``UserWarning``

  * :class:`HalfstepWarning`: every warning of the package, for a filter.

    * :class:`SkippedStepsWarning`: steps are being skipped, and training goes on.
    * :class:`DiagnosisWarning`: a diagnosis found the op that made a step go wrong.

A few exceptions inside the package are not listed: halfstep catches each of them itself.
"""


class CallOrderError(RuntimeError):
    """A method was called at a moment when it cannot do its work.

    The message names the object, what happened before, and what to call instead. Nothing was
    changed: the caller can go on with the right call.
    """


class NothingCheckedError(CallOrderError, AssertionError):
    """A step without a gradient, or the end of an iteration without a step.

    PyTorch raises ``AssertionError`` ("No inf checks were recorded"), and existing code expects it.
    """


class SkippedStepsError(RuntimeError):
    """Too many steps were skipped in a row, and the user asked for an error.

    The message gives the number of steps and the reason, names the parameters, and suggests what to
    try. The scaler stays usable: the iteration has ended as after any skipped step.
    """


class RanksError(RuntimeError):
    """The ranks of a job disagree on the scale, cannot be found, or one of them does not answer.

    The message says which rank has which state, or which call was waiting for which rank. No step
    was taken, except where the message says that the states differed some updates ago.
    """


class RecordError(ValueError):
    """The files of a recorded run cannot be read; the message names the file and the cure."""


class DemoError(ValueError):
    """A setting, a text or a folder that the demo cannot use; the message names the cure."""


class HalfstepWarning(UserWarning):
    """A warning of halfstep; what it says is its text.

    Example:
        >>> import warnings
        >>> warnings.filterwarnings("error", category=HalfstepWarning)
    """


class SkippedStepsWarning(HalfstepWarning):
    """Steps are being skipped and no smaller scale helps, or too many in a row were skipped."""


class DiagnosisWarning(HalfstepWarning):
    """A step went bad; the message names the op, the module, the line, the cause and the cure."""
