"""The demo: one small GPT, one text, four precisions, side by side (``halfstep demo``)."""
