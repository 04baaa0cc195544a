"""A framework that is not installed is an error that says how to install it."""

import importlib
import sys

import pytest


@pytest.mark.parametrize("framework", ["fastai", "timm"])
def test_the_error_names_the_package_and_the_cure(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"halfstep.integrations.{framework}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == framework]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, framework, None)  # as if it were not there
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(module)
    assert str(error.value) == (
        f"{module} needs the package {framework}, which is not installed; "
        f"install it with: pip install 'halfstep[{framework}]'"
    )
