# What tools need.
import halfstep

tools = [name for name, module in halfstep._MODULES.items() if "._tools." in module]
assert {"record", "trace", "tune", "diagnose"} <= set(tools)
for name in [*tools, "main"]:
    try:
        getattr(halfstep, name) if name in tools else __import__("halfstep._tools.cli")
    except ModuleNotFoundError as error:
        assert str(error).startswith(MESSAGE), error
    else:
        raise AssertionError(name)
