# Executed by gpt_trainer.py in its own namespace: a file of settings, and --name=value.
from ast import literal_eval

for word in sys.argv[1:]:  # noqa: F821
    if word.startswith("--"):
        name, value = word[2:].split("=")
        assert name in globals(), name
        globals()[name] = value if name == "dtype" else literal_eval(value)
    else:
        with open(word) as settings:
            exec(settings.read())
