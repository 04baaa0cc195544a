"""The errors of halfstep, all in one place.

A wrong value raises ``ValueError`` and a wrong type ``TypeError``, as everywhere in Python. What is
left is the order of calls:

* ``RuntimeError``
    * :class:`CallOrderError`: the call itself is fine, but not now (``step`` twice, ``update``
      before ``step``, ...). The object stays usable.
"""


class CallOrderError(RuntimeError):
    """A method was called at a moment when it cannot do its work.

    The message names the object, what was seen before, and what to call instead. Nothing was
    changed: the caller can go on with the right call.
    """
