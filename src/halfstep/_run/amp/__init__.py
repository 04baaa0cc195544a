"""Mixed precision for a script that has none; :mod:`halfstep._run.mixed_precision` is the way in.

=================  ==============================================================================
``forward``        the outermost modules, and the loss functions, run under autocast
``outputs``        what a model returns, in float32
``backward``       losses are scaled, and gradients are divided by the scale right afterwards
``fresh``          what was found in gradients on the way, until their optimizer steps
``steps``          optimizers step through the scaler
``schedules``      schedules wait for a step that was taken
``findings``       what of all this a script has, and what it is told
``patches``        putting functions in the place of others, and taking them back
=================  ==============================================================================
"""
