import pickle
import subprocess
import sys

import pytest
import torch

from halfstep.casting import Policy, Rule, preset

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

    assert Policy(rules, name="a") == Policy(rules, name="b")
    assert hash(Policy(rules)) == hash(Policy(rules))
    assert Policy(rules) != Policy(rules[::-1])
    assert Policy(rules) != rules
    with pytest.raises(AttributeError):
        Policy(rules).rules = ()  # type: ignore[misc]


def test_reprs_say_what_is_there() -> None:
    assert repr(Rule("exp", "fp32", dtype=FP16)) == "Rule('exp', 'fp32', dtype=torch.float16)"
    assert repr(Policy([Rule("exp", "fp32")], "mine")) == "<Policy 'mine': 1 rules>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("exp", "fp23"),
            r"rule for 'exp': unknown action 'fp23'; the actions are 'lower', 'fp32'",
        ),
        (("aten::exp", "fp32"), r"a rule names an ATen op such as 'softmax'.*got 'aten::exp'"),
        (("", "fp32"), r"a rule names an ATen op"),
        ((torch.exp, "fp32"), r"a rule names an ATen op"),
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
    with pytest.raises(TypeError, match=r"made of rules: pass <Policy 'standard'.*>\.rules"):
        Policy(preset("standard"))  # type: ignore[arg-type]


def test_a_policy_is_the_same_in_every_process() -> None:
    """Hashes of strings are not: neither hash nor fingerprint may travel or depend on them."""
    code = """
import pickle, sys
policy = pickle.loads(bytes.fromhex(sys.argv[1]))
from halfstep import preset
assert policy == preset("standard") and policy in {preset("standard")}, "hash"
print(policy.name, policy.fingerprint)
"""
    policy = Policy(preset("standard").rules, "mine")
    assert hash(policy)
    done = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(policy).hex()], capture_output=True, text=True
    )
    assert done.stdout.split() == ["mine", policy.fingerprint], done.stderr
    assert policy.fingerprint == preset("standard").fingerprint
    assert policy.fingerprint != preset("torch").fingerprint


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no policy preset 'apex'.*'standard', 'torch'"):
        preset("apex")
