import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep._autocast import Policy, Rule, preset
from halfstep._autocast.policy import fingerprint, meant_by
from halfstep._autocast.written import PRESETS

CPU, BF16, FP16 = "cpu", torch.bfloat16, torch.float16


def test_the_last_rule_that_holds_decides() -> None:
    policy = Policy([Rule("softmax", "fp32"), Rule("softmax", "lower"), Rule("exp", "fp32")])

    assert policy.action("softmax.int", CPU, BF16) == "lower"
    assert policy.action("exp.default", CPU, BF16) == "fp32"
    assert policy.action("sin.default", CPU, BF16) == "leave"


def test_an_overload_and_its_op_are_ordered_by_position() -> None:
    narrow_last = Policy([Rule("conv1d", "lower"), Rule("conv1d.padding", "fp32")])
    wide_last = Policy([Rule("conv1d.padding", "fp32"), Rule("conv1d", "lower")])

    assert narrow_last.action("conv1d.padding", CPU, BF16) == "fp32"
    assert narrow_last.action("conv1d.default", CPU, BF16) == "lower"
    assert wide_last.action("conv1d.padding", CPU, BF16) == "lower"


def test_rules_can_be_limited_to_a_device_and_a_dtype() -> None:
    policy = Policy([Rule("exp", "fp32", device="cuda"), Rule("log", "fp32", dtype=FP16)])

    assert policy.action("exp.default", "cuda", BF16) == "fp32"
    assert policy.action("exp.default", CPU, BF16) == "leave"
    assert policy.action("log.default", CPU, FP16) == "fp32"
    assert policy.action("log.default", CPU, BF16) == "leave"


def test_policies_are_values() -> None:
    rules = [Rule("exp", "fp32"), Rule("mm", "lower")]

    assert Policy(rules) == Policy(iter(rules))
    assert hash(Policy(rules)) == hash(Policy(rules))
    assert Policy(rules) != Policy(rules[::-1])
    assert Policy(rules) != rules
    with pytest.raises(AttributeError):
        Policy(rules).rules = ()  # type: ignore[misc]


def test_reprs_say_what_is_there() -> None:
    assert repr(Rule("exp", "fp32", dtype=FP16)) == "Rule('exp', 'fp32', dtype=torch.float16)"
    assert repr(Policy([Rule("exp", "fp32")])) == "<Policy fp32; exp:fp32>"
    assert repr(preset("standard") | "exp:leave") == "<Policy standard; exp:leave>"
    assert len(repr(Policy(preset("standard").rules[::-1]))) < 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("exp", "fp23"),
            r"rule for 'exp': unknown action 'fp23', not one of lower, .*; did you mean 'fp32'\?$",
        ),
        (("softmax int", "fp32"), r"a rule names an op such as 'softmax'.*got 'softmax int'"),
        (("", "fp32"), r"a rule names an op"),
        ((torch.exp, "fp32"), r"a rule names an op"),
        (("a::b::c", "fp32"), r"a rule names an op"),
        (("exp", "fp32", "cuda:0"), r"a device type is 'cpu', 'cuda', \.\.\., got 'cuda:0'"),
        (("exp", "fp32", "CPU"), r"a device type is 'cpu'"),
        (("exp", "fp32", None, "bfloat16"), r"torch\.float16 or torch\.bfloat16, got dtype='bf"),
        (("exp", "fp32", None, torch.int8), r"torch\.float16 or torch\.bfloat16"),
        (("exp", "refuse"), r"a message goes with the action 'refuse'"),
        (("exp", "fp32", None, None, "text"), r"a message goes with the action 'refuse'"),
    ],
)
def test_a_wrong_rule_is_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule(*arguments)  # type: ignore[arg-type]


def test_a_policy_is_made_of_rules() -> None:
    with pytest.raises(TypeError, match=r"made of Rule values, got 'softmax:fp32'"):
        Policy(["softmax:fp32"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"made of rules: write policy \| rules"):
        Policy(preset("standard"))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_policy_is_the_same_in_every_process() -> None:
    """Hashes of strings are not: neither hash nor fingerprint may travel or depend on them."""
    code = """
import pickle, sys
policy = pickle.loads(bytes.fromhex(sys.argv[1]))
from halfstep import preset
from halfstep._autocast.policy import fingerprint
assert policy == preset("standard") and policy in {preset("standard")}, "hash"
print(fingerprint(policy))
"""
    policy = Policy(preset("standard").rules)
    assert hash(policy)
    done = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(policy).hex()], capture_output=True, text=True
    )
    assert done.stdout.split() == [fingerprint(policy)], done.stderr
    assert fingerprint(policy) == fingerprint(preset("standard"))
    assert fingerprint(policy) != fingerprint(preset("torch"))


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no policy preset 'standart'; did you mean 'standard'\?"):
        preset("standart")


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("people", "aten"),
    [
        ("F.layer_norm", "layer_norm"),
        ("torch.nn.functional.gelu", "gelu"),
        ("torch.softmax", "softmax"),
        ("torch.linalg.qr", "linalg_qr"),
        ("torch.fft.rfft", "fft_rfft"),
        ("aten::mm", "mm"),
        ("torch.ops.aten.softmax.int", "softmax.int"),
        ("F.cross_entropy", "cross_entropy_loss"),
        ("F.fold", "col2im"),
        ("F.unfold", "im2col"),
        ("unfold", "unfold"),  # of a tensor
        ("F.affine_grid", "affine_grid_generator"),
        ("mylib::attention", "mylib::attention"),
    ],
)
def test_names_that_people_use(people: str, aten: str) -> None:
    assert Rule(people, "fp32") == Rule(aten, "fp32")


def test_a_glob_ranges_over_the_ops_that_presets_name() -> None:
    policy = preset("standard") | Rule("conv?d", "fp32")

    assert policy.action("conv2d.default", CPU, BF16) == "fp32"
    assert policy.action("conv2d.padding", CPU, BF16) == "fp32"
    assert policy.action("conv_transpose2d.input", CPU, BF16) == "lower"
    assert (policy | "conv2d:leave").action("conv2d.default", CPU, BF16) == "leave"
    assert meant_by([Rule("*norm*", "fp32")]) >= {"layer_norm.default", "rms_norm.default"}
    assert "normal_functional.default" not in meant_by([Rule("*norm*", "fp32")])


# --- texts and files ------------------------------------------------------------------------------


def test_a_text_is_a_preset_and_rules() -> None:
    text = 'standard; softmax,conv*[cuda,fp16]:lower; exp:fp32; pow[bf16]:refuse "no; \\"x\\""'
    policy = Policy.parse(text)

    assert str(policy) == text
    assert policy == preset("standard") | [
        Rule("softmax", "lower", "cuda", FP16),
        Rule("conv*", "lower", "cuda", FP16),
        Rule("exp", "fp32"),
        Rule("pow", "refuse", dtype=BF16, message='no; "x"'),
    ]
    assert Policy.parse(" standard ;softmax , conv* [ fp16,cuda ] : lower;\nexp:fp32;") == (
        preset("standard") | policy.rules[-4:-1]
    )
    assert str(Policy.parse("standard")) == "standard"


rules = st.builds(
    Rule,
    st.sampled_from(["softmax", "conv*", "exp.default", "F.gelu", "?m", "linear"]),
    st.sampled_from(["lower", "fp32", "promote", "leave"]),
    st.sampled_from([None, "cpu", "cuda"]),
    st.sampled_from([None, FP16, BF16, torch.float32]),
    module=st.sampled_from([None, "head", "blocks.*.attn", "*-?"]),
)
whole_modules = st.builds(
    Rule,
    st.just(""),
    st.sampled_from(["fp32", "leave"]),
    st.sampled_from([None, "cpu"]),
    module=st.sampled_from(["head", "*.norm"]),
)
refusals = st.builds(
    Rule,
    st.just("pow"),
    st.just("refuse"),
    message=st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda t: t == t.strip()),
)


@pytest.mark.slow
@given(st.sampled_from(PRESETS), st.lists(rules | whole_modules | refusals, max_size=6))
def test_text_and_file_give_back_the_policy(name: str, more: list[Rule]) -> None:
    policy = preset(name) | more
    assert Policy.parse(str(policy)) == policy
    with TemporaryDirectory() as folder:
        policy.save(Path(folder) / "my.policy")
        assert Policy.load(Path(folder) / "my.policy") == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"must start with a preset \(standard, torch, .*\); got ''"),
        ("softmax:lower", r"must start with a preset .*; got 'softmax:lower'"),
        ("standart; exp:fp32", r"got 'standart'; did you mean 'standard'\?"),
        ("standard; exp", r"rule 'exp' is not of the form op,op@module\[condition,\.\.\.\]:action"),
        ("standard; @head:lower", r"as a whole it can be an island, 'fp32', or 'leave'"),
        ("standard; exp@a..b:fp32", r"a module is a name such as .*got 'a\.\.b'"),
        ("standard; exp@:fp32", r"is not of the form"),
        ("standard; :fp32", r"a rule names an op such as"),
        (
            "standard; exp:fp23",
            r"rule 'exp:fp23': unknown action 'fp23', not one of .*; did you mean 'fp32'\?$",
        ),
        *(
            (
                f"standard; softmax@blocks.*:{name}",
                f"{name}': {name} is not an action; write lower, .* dtype of the autocast: {short} "
                rf"in autocast\(device, {dtype}\). \[{short}\] limits a rule to such contexts$",
            )
            for name, short, dtype in (
                ("bf16", "bf16", BF16),
                ("bfloat16", "bf16", BF16),
                ("half", "fp16", FP16),
            )
        ),
        ("standard; softmax:float32", "float32 is not an action; write fp32$"),
        ("standard; exp[cud]:fp32", r"'cud' in the brackets; did you mean 'cuda'"),
        ("standard; exp[fp16,bf16]:fp32", r"'bf16' in the brackets.*one of fp16 and bf16"),
        ("standard; exp[eval]:fp32", r"'eval' in the brackets: .*enter contexts with a policy"),
        ("standard; sofmax:fp32", r"'sofmax:fp32': there is no op 'sofmax'; did you mean 's"),
        ("standard; softmax.integer:fp32", r"no op 'softmax.integer'; did you mean 'softmax.int'"),
        ("standard; convolutin*:fp32", r"no op named in a preset matches 'convolutin\*'; did"),
        ("standard; nolib::op:fp32", r"no op 'nolib::op'; import the library that defines it"),
        ("standard; e xp:fp32", r"rule 'e xp:fp32': a rule names an op such as"),
        ('standard; pow:refuse "no', r"a double quote is not closed"),
        ('standard; exp:fp32"; log:fp32', r"a double quote is not closed"),
        ('standard; pow:refuse "\\x"', r"rule 'pow:refuse .*: Invalid"),
        ('standard; exp:fp32 "why"', r"a message goes with the action 'refuse'"),
    ],
)
def test_a_wrong_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy.parse(text)


FILE = """\
# ours
standard  # as everybody; nothing else

F.softmax,  # a rule may go on
    conv*[cuda,xpu]:lower

exp[fp16]:fp32; @head : fp32
pow:refuse "no # comment; and
no end"
"""


def test_a_file_is_the_text_in_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.policy"
    path.write_text(FILE)
    expected = (
        "standard; softmax,conv*[cuda]:lower; softmax,conv*[xpu]:lower; exp[fp16]:fp32; @head:fp32"
    )
    refusal = Rule("pow", "refuse", message="no # comment; and\nno end")
    assert Policy.load(path) == Policy.parse(FILE) == Policy.parse(expected) | refusal


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "standard ",
            "standart ",
            "start with a preset .* got 'standart'; did you mean 'standard'",
        ),
        ("standard ", '[[rules]]\nops = ["exp"] ', "start with a preset .* got "),
        ("lower", "lowr", r"rule 'softmax,conv\*\[cuda,xpu\]:lowr': unknown action 'lowr'"),
        ("exp[", "exq[", "there is no op 'exq'; did you mean"),
        ("softmax,  #", "softmax  #", "rule 'softmax' is not of the form"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.policy"
    path.write_text(FILE.replace("F.", "").replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"mine\.policy: .*{message}"):
        Policy.load(path)


# --- comparing and explaining ---------------------------------------------------------------------


def num_calls(function: Callable[[], object]) -> int:
    """Return how many functions are called, those in C too."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("form", ["text", "ops", "file"])
def test_reading_takes_work_in_proportion_to_the_rules(tmp_path: Path, form: str) -> None:
    def work(num_rules: int) -> int:
        names = [f"a{number}" for number in range(num_rules)]
        text = "; ".join(["standard", *(f"softmax@{name}:lower" for name in names)])
        if form == "ops":
            text = f"standard; {','.join(['softmax'] * num_rules)}:lower"
        if form == "file":
            path = tmp_path / f"{num_rules}.policy"
            Policy.parse(text).save(path)
            return num_calls(lambda: Policy.load(path))
        return num_calls(lambda: Policy.parse(text))

    work(1)  # what is read once
    few, many = work(1_000), work(2_000)
    assert many < 2.1 * few
    assert (many - few) / 1_000 < {"text": 24, "ops": 12, "file": 24}[form]


def test_the_rule_that_decides() -> None:
    policy = preset("standard") | "exp:lower; exp[fp16]:leave"
    assert str(policy.rule("exp.default", CPU, FP16)) == "exp[fp16]:leave"
    assert str(policy.rule("exp.default", CPU, BF16)) == "exp:lower"
    assert preset("fp32").rule("mm.default", CPU, BF16) is None


def test_rules_by_action() -> None:
    """One that a later rule replaces is left out."""
    policy = Policy.parse("fp32; exp,log[fp16]:fp32; log:lower; exp@a:lower; @head:fp32; sin:lower")
    assert policy.by_action() == {
        "[fp16]:fp32, cast to float32": ["exp"],
        "lower, cast to the lower precision": ["log", "sin"],
        "@a:lower, cast to the lower precision": ["exp"],
        "@head:fp32, cast to float32": ["the module as a whole"],
    }
