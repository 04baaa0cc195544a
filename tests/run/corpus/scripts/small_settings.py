num_steps = 4
accumulate = 2
