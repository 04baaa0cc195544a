# Processes that end with an exit code, with an error, and well.
import multiprocessing

import work


def fail(error):
    work.train(2)
    if error is not None:
        raise error


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    for error in (SystemExit(4), ValueError("of the process"), None):
        try:
            raise KeyError("of the parent")
        except KeyError:
            process = context.Process(target=fail, args=(error,))
            process.start()
            process.join()
