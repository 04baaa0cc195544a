"""``halfstep doctor``: what it prints, and its exit codes."""

import json

import pytest
from tests.cli.called import called

from halfstep._tools.cli import main
from halfstep._tools.doctor import hardware
from halfstep._tools.doctor.hardware import speeds_of

GOOD = """\
from halfstep import GradScaler, autocast
scaler = GradScaler()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
"""
BAD = GOOD.replace("scaler.step(optimizer)", "optimizer.step()")
NOTICE = """\
import torch
model.bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The measurement is tested elsewhere; here it is known."""
    measured = []

    def measure(device: str):
        measured.append(device)
        names = ("fp32", "bf16", "fp16")
        works = [(kind, name, 1e12) for kind in ("matmul", "conv") for name in names]
        return speeds_of(works, [[1.0, 0.25, 4.0, 1.0, 0.5, 2.0]])

    monkeypatch.setattr(hardware, "measure_speeds", measure)
    return measured


def doctor(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code, out, err = called(capsys, "doctor", *argv)
    assert err == ""
    return code, out


def test_the_machine(capsys) -> None:
    code, printed = doctor(capsys)
    assert code == 0
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "GFLOP/s fp32 bf16 fp16" in lines
    assert "matrix products 1,000 4,000 (4 x) 250 (0.25 x)" in lines
    assert "convolutions 1,000 2,000 (2 x) 500 (0.5 x)" in lines
    assert any(line.startswith("use bf16: matrix products run at 4 x") for line in lines)
    assert max(map(len, printed.splitlines())) <= 110


@pytest.mark.parametrize(("source", "code"), [(GOOD, 0), (NOTICE, 0), (BAD, 1)])
def test_the_exit_code_says_whether_something_is_wrong(tmp_path, capsys, source, code) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    found, printed = doctor(capsys, "--no-machine", script)
    assert found == code
    if source is GOOD:
        assert printed == f"good: {script}: nothing found in 1 scaler and 1 backward call\n"
    if source is NOTICE:
        assert printed.startswith(f"notice: {script}:2: `model.bfloat16()` makes")
    if source is BAD:
        first, *rest = printed.splitlines()
        assert first.startswith(f"bad: {script}:4: `optimizer.step()` takes gradients")
        assert first.endswith("[scaler-bypassed]")
        assert "        scaler.step(optimizer)" in rest
        assert rest[-1] == "more: halfstep doctor --explain scaler-bypassed"


def test_a_finding_is_explained_where_there_are_no_docs(tmp_path, capsys) -> None:
    (script := tmp_path / "train.py").write_text(BAD)
    more = doctor(capsys, "--no-machine", script)[1].splitlines()[-1]
    code, printed = doctor(capsys, *more.removeprefix("more: halfstep doctor ").split())
    assert code == 0
    assert printed.startswith("bad: scaler-bypassed\n")
    assert printed.index("# wrong") < printed.index("optimizer.step()") < printed.index("# right")
    assert main(["doctor", "--explain", "update-mising"]) == 2
    assert "; did you mean 'update-missing' or" in capsys.readouterr().err


def test_findings_come_before_the_machine(tmp_path, capsys) -> None:
    (script := tmp_path / "train.py").write_text(BAD)
    assert doctor(capsys, script)[1].startswith(f"bad: {script}:4: ")


def test_good_is_said_of_what_was_recognized(tmp_path, capsys) -> None:
    for name, source in {"a.py": GOOD, "b.py": GOOD, "c.py": "half = x.half().square()\n"}.items():
        (tmp_path / name).write_text(source)
    code, printed = doctor(capsys, "--no-machine", *sorted(tmp_path.iterdir()))
    assert (code, printed) == (
        0,
        "good: 3 files: nothing found in 2 scalers and 2 backward calls\n",
    )
    code, printed = doctor(capsys, "--no-machine", tmp_path / "c.py")
    assert code == 0
    assert printed.startswith(f"{tmp_path / 'c.py'}: nothing was checked: no autocast, scaler")


def test_the_worst_of_several_files_comes_first(tmp_path, capsys, quick) -> None:
    for name, source in {"a.py": NOTICE, "b.py": BAD, "c.py": GOOD}.items():
        (tmp_path / name).write_text(source)
    code, printed = doctor(capsys, "--no-machine", *sorted(tmp_path.iterdir()))
    found = [line for line in printed.splitlines() if not line.startswith((" ", "more"))]
    assert code == 1
    assert [line.partition(": ")[0] for line in found] == ["bad", "notice"]
    assert quick == []


def test_json(tmp_path, capsys) -> None:
    script = tmp_path / "train.py"
    script.write_text(BAD)
    code, printed = doctor(capsys, "--json", script)
    values = json.loads(printed)
    assert code == 1
    assert (values["schema"], values["kind"], values["worst"]) == (1, "doctor", "bad")
    assert [each["id"] for each in values["findings"]] == ["scaler-bypassed"]
    assert values["machine"]["advice"]["precision"] == "bf16"
    code, printed = doctor(capsys, "--json", "--no-machine", script)
    assert "machine" not in json.loads(printed)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        (b"a = 1\nwith x\n", ":2: not Python: expected ':'"),
        (b"a = '\x00'", "not Python"),
        (b"\xff\xfe", "not Python"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_usage(tmp_path, capsys, content, message) -> None:
    script = tmp_path / "train.py"
    if content is not None:
        script.write_bytes(content)
    assert main(["doctor", "--no-machine", str(script)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"halfstep doctor: {script}")
    assert message in captured.err


@pytest.mark.parametrize(("other", "prints"), [(BAD, "[scaler-bypassed]"), ("a = 1", "train.py: ")])
def test_the_other_files_are_read_all_the_same(tmp_path, capsys, other, prints) -> None:
    unread, script = tmp_path / "not.py", tmp_path / "train.py"
    unread.write_text("with x\n")
    script.write_text(other)
    assert main(["doctor", "--no-machine", str(unread), str(script)]) == 2
    captured = capsys.readouterr()
    assert prints in captured.out
    assert captured.err.startswith(f"halfstep doctor: {unread}:1: not Python")


@pytest.mark.parametrize("command", [["doctor", "--no-machine"], ["run"]])
def test_a_folder_is_no_script(tmp_path, capsys, command) -> None:
    (tmp_path / "train.py").touch()
    assert main([*command, str(tmp_path)]) == 2
    assert f"is a folder: name a file in it, such as {tmp_path}/train.py" in capsys.readouterr().err


def test_nothing_to_do_is_said(capsys) -> None:
    assert main(["doctor", "--no-machine"]) == 2
    assert "--no-machine leaves nothing to do: name a script" in capsys.readouterr().err
