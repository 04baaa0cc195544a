"""``halfstep demo``: one small GPT and one text in four precisions, side by side."""
