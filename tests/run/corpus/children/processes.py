# Usage: processes.py METHOD FUNCTION [--alone STEPS] STEPS...: a process for each number of steps.
import multiprocessing
import sys

import work

if __name__ == "__main__":
    method, function, *steps = sys.argv[1:]
    if steps[0] == "--alone":
        work.train(int(steps[1]))
        steps = steps[2:]
    context = multiprocessing.get_context(method)
    for each in map(int, steps):
        process = context.Process(target=getattr(work, function), args=(each,))
        process.start()
        process.join()
        assert process.exitcode == 0
