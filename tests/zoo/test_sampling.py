"""A seed gives the same random numbers every time: here, on a server, in another process, after a new connection."""

from __future__ import annotations

import copy

import pytest
import torch

from evaluation.zoo import sampling

REMOTE = "remote_accelerator:0"


@pytest.fixture(scope="module")
def expected():
    return sampling.draw("cpu")


@pytest.fixture
def server(connect, url_of):
    """Connect to a server in another process, with a new session for each test."""
    with connect(url_of("tcp")):
        yield


def test_seed_gives_same_numbers_as_local(server, expected):
    found = sampling.draw(REMOTE)
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name


def test_seed_is_reproducible(server):
    first, again = (sampling.fingerprint(sampling.draw(REMOTE)) for _ in range(2))
    assert first == again
    torch.manual_seed(sampling.SEED)
    sampled = torch.rand(5, device=REMOTE).cpu()
    torch.manual_seed(sampling.SEED + 1)
    assert not torch.rand(5, device=REMOTE).cpu().equal(sampled)


def test_seed_is_reproducible_across_sessions(connect, url_of, embedded, expected):
    djinn_gives = [sampling.fingerprint(sampling.draw(REMOTE))]  # an executor of this process's own
    for scheme in ("tcp", "tcp", "http"):
        with connect(url_of(scheme)):
            djinn_gives.append(sampling.fingerprint(sampling.draw(REMOTE)))
    assert set(djinn_gives) == {sampling.fingerprint(expected)}


def test_seed_is_reproducible_across_processes(python, serving, url_of, plain_environment, expected):
    run = python.run(sampling.__file__, url_of("tcp"), serving.token, env=plain_environment)
    assert run.stdout.strip() == sampling.fingerprint(expected), run.stderr


def test_dropout_equals_local(server):
    expected = sampling.train_with_dropout("cpu")
    torch.testing.assert_close(sampling.train_with_dropout(REMOTE), expected)


def test_sampled_tokens_are_equal_after_reconnection(connect, url_of):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()

    def generate(device):
        torch.manual_seed(sampling.SEED)
        ids = torch.arange(3, 9).view(2, 3).to(device)
        options = {"do_sample": True, "top_p": 0.9, "temperature": 1.5, "pad_token_id": 0}
        theirs = copy.deepcopy(model).to(device)
        return theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **options).tolist()

    expected = generate("cpu")
    for _ in range(2):
        with connect(url_of("tcp")):
            assert generate(REMOTE) == expected
