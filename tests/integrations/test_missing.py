"""A framework that is not installed is an error that says how to install it."""

import importlib
import sys

import pytest


@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_the_error_names_the_package_and_the_cure(framework, monkeypatch):
    module = f"halfstep.integrations.{framework}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == framework]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        """Finds no such package."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == framework:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(module)
    assert str(error.value) == (
        f"{module} needs the package {framework}, which is not installed; "
        f"install it with: pip install 'halfstep[{framework}]'"
    )
