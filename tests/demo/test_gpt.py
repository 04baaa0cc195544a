import pytest
import torch
import torch.nn.functional as F

from halfstep._demo.gpt import GPT, SIZES, GPTConfig


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=11, context=8, layers=2, heads=2, width=16))


def test_the_43m_size_has_43_million_parameters():
    with torch.device("meta"):
        model = GPT(GPTConfig.of_size("43m", vocab=100))
    assert round(model.num_parameters() / 1e6) == 43


def test_sizes_grow():
    with torch.device("meta"):
        counts = [GPT(GPTConfig.of_size(size, vocab=100)).num_parameters() for size in SIZES]
    assert counts == sorted(counts)


def test_a_token_does_not_see_the_ones_after_it(model):
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 10
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_a_token_sees_all_before_it_and_where_they_stand(model):
    last = model(torch.tensor([[1, 2, 3, 4]]))[0, -1]
    assert not torch.allclose(last, model(torch.tensor([[9, 2, 3, 4]]))[0, -1])
    assert not torch.allclose(last, model(torch.tensor([[2, 1, 3, 4]]))[0, -1])


def test_it_starts_without_an_opinion(model):
    """The first loss is near that of guessing; what is far above learns to forget first."""
    tokens = torch.randint(11, (64, 8))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), torch.randint(11, (512,)))
    assert loss.item() == pytest.approx(torch.log(torch.tensor(11.0)).item(), abs=0.8)


def test_every_parameter_gets_a_gradient(model):
    model(torch.randint(11, (4, 8))).square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"heads": 3}, "width must be a multiple of heads, got 16 and 3"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    shape = {"vocab": 11, "context": 8, "layers": 2, "heads": 2, "width": 16}
    with pytest.raises(ValueError, match=message):
        GPTConfig(**shape | changes)


def test_unknown_size_names_the_sizes():
    with pytest.raises(ValueError, match=r"'huge'.*tiny, small, medium, 43m"):
        GPTConfig.of_size("huge", vocab=100)
