"""What people look with: command, runner, records and reports, diagnosis, doctor, tune, trace."""

from importlib.util import find_spec

for _name in ("jinja2", "msgspec"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(
            f"halfstep's tools need the package {_name}, which is not installed; install it with: "
            "pip install 'halfstep[tools]'. Training needs none of them",
            name=_name,
        )
