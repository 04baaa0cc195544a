"""Every private name of PyTorch that halfstep uses still does what it is used for.

A failure here names what a new version of PyTorch took away; ``_torch.py`` is the file to change.
"""

import threading

import torch

from halfstep import _torch


def test_keys_and_kernels_of_the_dispatcher() -> None:
    key = _torch.autocast_key("cpu")

    assert key.name == "AutocastCPU"
    assert _torch.autocast_key("cuda").name == "AutocastCUDA"
    assert _torch.key_set(key).has(key)
    assert not _torch.keys_below(key).has(key)
    assert {"default", "int"} & set(_torch.aten_overloads()["softmax"])
    assert "linear.default" in _torch.overloads_with_autocast_kernel("cpu")
    with torch.autocast("cpu", torch.bfloat16), _torch.exclude_keys(_torch.key_set(key)):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_nodes_are_numbered_as_they_are_made() -> None:
    x = torch.ones(1, requires_grad=True)
    number = _torch.next_node_number()
    y = x * 2
    assert y.grad_fn is not None
    assert _torch.node_number(y.grad_fn) == number
    assert _torch.next_node_number() == number + 1


def test_a_backward_pass_knows_its_number_and_node() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    x.register_hook(lambda _: seen.append((_torch.backward_id(), _torch.current_node())))
    assert (_torch.backward_id(), _torch.current_node()) == (-1, None)
    y.backward()
    ((number, node),) = seen
    assert number >= 0
    assert node is not None


def test_a_thread_does_not_see_what_another_one_hands_to_its_backward_pass() -> None:
    _torch.set_inherited("halfstep.test", "here")
    assert _torch.get_inherited("halfstep.test") == "here"
    elsewhere: list[bool] = []
    thread = threading.Thread(
        target=lambda: elsewhere.append(_torch.has_inherited("halfstep.test"))
    )
    thread.start()
    thread.join()
    assert elsewhere == [False]


def test_switches_come_back() -> None:
    before = _torch.autocast_switches("cpu")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    _torch.set_autocast_switches(before)
    assert _torch.autocast_switches("cpu") == before
    assert "cpu" in _torch.autocast_devices()


def test_the_compile_guard_is_guarded_on() -> None:
    compiled = 0

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        nonlocal compiled
        compiled += 1
        return graph.forward

    function = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)
    for number, expected in ((None, 1), (0, 2), (1, 3), (0, 3), (None, 3)):
        _torch.set_compile_guard(number)
        function(torch.ones(1))
        assert compiled == expected
    assert _torch.NUM_GUARD_VALUES > 20
