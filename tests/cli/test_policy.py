import re

import pytest
from tests.cli.called import called

from halfstep import preset


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "policy", "show", "fp32; exp,log[fp16]:fp32", "--all")
    assert code == 0
    assert out == "fp32; exp,log[fp16]:fp32\n  exp[fp16]:fp32\n  log[fp16]:fp32\n"
    code, out, _ = called(capsys, "policy", "show", "standard; exp:leave", "--op", "torch.exp")
    assert (code, out) == (0, "exp.default\n  leave: by exp:leave\n  overruled: exp:fp32\n")
    text = "standard; exp@head:leave"
    code, out, _ = called(capsys, "policy", "show", text, "--op", "exp", "--module", "head.proj")
    assert (code, "by exp@head:leave" in out) == (0, True)


def test_show_by_action(capsys, monkeypatch):
    """Rules of one action stand together; one that a later rule replaces is left out."""
    text = "fp32; exp,log[fp16]:fp32; log:lower; exp@a:lower; @head:fp32; sin:lower"
    code, out, _ = called(capsys, "policy", "show", text)
    assert code == 0
    assert out.splitlines()[1:] == [
        "  [fp16]:fp32, cast to float32",
        "      exp",
        "  lower, cast to the lower precision",
        "      log, sin",
        "  @a:lower, cast to the lower precision",
        "      exp",
        "  @head:fp32, cast to float32",
        "      the module as a whole",
    ]
    monkeypatch.setenv("COLUMNS", "10")  # words stay whole
    named = re.findall(r"[\w.]+", called(capsys, "policy", "show", "standard")[1])
    assert {rule.op for rule in preset("standard").rules} <= set(named)


def test_a_file_with_a_mistake_is_an_error_that_names_its_rule(capsys, tmp_path):
    path = tmp_path / "mine.policy"
    path.write_text("standard\nexp:leaf\n")
    code, _, err = called(capsys, "policy", "show", str(path))
    assert code == 2
    assert f"{path}: policy rule 'exp:leaf': unknown action 'leaf', not one of " in err
    path.write_bytes(b"\x00\xff")
    assert f"{path}: not a text file:" in called(capsys, "policy", "show", str(path))[2]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show", "standart"], "did you mean 'standard'?"),
        (["show", "mul:fp32"], "got 'mul:fp32'; did you mean 'standard; mul:fp32'?"),
        (["show", "standard", "--op", "sofmax"], "policy: there is no op 'sofmax'; did you mean"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    code, out, err = called(capsys, "policy", *argv)
    assert (code, out) == (2, "")
    assert err.startswith("halfstep policy: ")
    assert message in err


@pytest.mark.parametrize(
    ("argv", "end"),
    [
        (["policy", "standard; exp:leave"], "halfstep policy show 'standard; exp:leave'\n"),
        (["policy", "check", "my.policy"], "choose one of show\n"),
        (["policy", "diff", "a", "b"], "`halfstep policy show POLICY --all` prints for each\n"),
        (["diagnose", "train.py"], "; did you mean 'halfstep run --diagnose'?\n"),
    ],
)
def test_a_verb_that_is_none_is_a_policy_or_an_option_of_run(capsys, argv, end):
    with pytest.raises(SystemExit):
        called(capsys, *argv)
    assert capsys.readouterr().err.endswith(end)


def test_a_file_that_does_not_exist_is_looked_for(capsys, tmp_path):
    (tmp_path / "mine.policy").write_text("standard\n")
    _, _, err = called(capsys, "policy", "show", str(tmp_path / "mien.policy"))
    assert err.endswith(f"; did you mean {str(tmp_path / 'mine.policy')!r}?\n")
