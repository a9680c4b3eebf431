"""A sampler over a server: the protocol, its weights, its importance weights, and what goes wrong."""

import re
from itertools import pairwise
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch

from pulsetrain.engine import Every, GRPOStrategy
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.rollouts import Sampling, ServerSampler, TextRollouts
from pulsetrain.engine.rollouts.server import ServerError
from pulsetrain.handlers import Checkpointer
from tests.support.models import Tokens, trainer
from tests.support.models_language import refusal
from tests.support.ports import free_port
from tests.support.rollouts import PROMPTS, VOCABULARY, Reward, texts
from tests.support.runs_backends import saved
from tests.support.runs_strategies import differences
from tests.support.text_servers import text_server

APIS = ["vllm", "sglang"]


def save(model, folder):
    torch.save(model.table.weight.detach().clone(), folder / "table.pt")


class Saving(Tokens):
    """Saves itself, as models of transformers do."""

    def __init__(self):
        super().__init__(VOCABULARY)

    def save_pretrained(self, folder):
        save(self, folder)


@pytest.fixture(params=APIS)
def server(request, tmp_path):
    with text_server(request.param, tmp_path / "policy", VOCABULARY) as running:
        yield running


def sampler(server, **options):
    return ServerSampler(server.url, api=server.api, **{"timeout": 30.0, **options})


# ------------------------------------------------------------------------------------------------------------- requests


def test_texts_come_with_their_tokens_log_probabilities(server):
    server.table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))
    prompts = [[1], [2, 3], [4]]
    found = sampler(server)(prompts, 6, temperature=0.5, end_token=0, seeds=[1, 2, 3])
    likely = (server.table.double() / 0.5).log_softmax(-1)
    for prompt, each in zip(prompts, found, strict=True):
        text = [prompt[-1], *each.tokens]
        expected = [float(likely[before, after]) for before, after in pairwise(text)]
        assert each.log_probs == pytest.approx(expected)
        assert len(each.tokens) == 6 or each.tokens[-1] == 0
        assert 0 not in each.tokens[:-1]


def test_the_options_have_the_servers_names(server):
    sampling = Sampling(top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, stop=["END"], decode=str)
    sampler(server)([[1]], 4, temperature=0.5, end_token=[0, 2], sampling=sampling, seeds=[7])
    path, given = server.requests[-1]
    shared = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    shared |= {"stop_token_ids": [0, 2], "stop": ["END"]}
    if server.api == "vllm":
        assert path == "/v1/completions"
        assert given == {
            **shared, "model": "policy", "prompt": [1], "max_tokens": 4, "logprobs": 0, "return_token_ids": True,
            "ignore_eos": True, "include_stop_str_in_output": True, "seed": 7,
        }  # fmt: skip
    else:
        assert path == "/generate"
        params = {**shared, "max_new_tokens": 4, "ignore_eos": False, "no_stop_trim": True}
        assert given == {"input_ids": [1], "sampling_params": params, "return_logprob": True}


def test_without_end_tokens_no_text_ends_early(server):
    sampler(server)([[1]], 4, end_token=None)
    given = server.requests[-1][1]
    assert (given if server.api == "vllm" else given["sampling_params"])["ignore_eos"] is True


def test_each_text_is_a_request_and_the_order_stays(server):
    server.table = 50 * torch.eye(VOCABULARY).roll(1, 1)  # counts
    found = sampler(server, concurrency=3)([[1], [2], [3], [1], [2]], 2)
    assert [each.tokens for each in found] == [[2, 3], [3, 4], [4, 5], [2, 3], [3, 4]]
    assert len(server.requests) == 6, "and one for the model's name"


def test_headers_are_sent():
    assert ServerSampler("http://x", headers={"Authorization": "Bearer k"})._headers["Authorization"] == "Bearer k"


# -------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("kind", ["function", "own"])
def test_a_rollout_is_drawn_by_the_current_weights(server, tmp_path, kind):
    made = sampler(server, folder=tmp_path / "policy", **({"save": save} if kind == "function" else {}))
    model = Tokens(VOCABULARY) if kind == "function" else Saving()
    run, recorded, _ = texts(GRPOStrategy(2), model=model, sampler=made, updates=3, prompts_per_rollout=5)
    run.train()
    assert server.reloads == 3
    assert server.resets == (3 if server.api == "vllm" else 0)
    for rollout in recorded.rollouts:  # float32 here, and the server computes in float64
        assert rollout.metrics["rollout/sampler_ratio"] == pytest.approx(1.0, abs=1e-4)
        assert rollout.metrics["rollout/sampler_capped"] == 0.0


def test_without_a_folder_the_servers_weights_stay(server):
    run, recorded, _ = texts(GRPOStrategy(2), sampler=sampler(server), updates=2, prompts_per_rollout=5)
    run.train()
    assert server.reloads == 0
    assert not server.table.any()
    assert recorded.rollouts[0].metrics["rollout/sampler_ratio"] != pytest.approx(1.0, abs=1e-2)


def test_a_model_that_does_not_save_itself_needs_a_function(server, tmp_path):
    made = sampler(server, folder=tmp_path / "policy")
    message = refusal(lambda: made.update_weights(Tokens(), 1))
    assert message.startswith("ServerSampler(save=None): Tokens does not save itself whole; pass a function")
    adapted = Saving()
    adapted.peft_config = {}
    assert "does not save itself whole" in refusal(lambda: made.update_weights(adapted, 1))


def test_a_run_with_a_server_is_recorded_and_resumes(server, tmp_path):
    """This server draws by the seed alone, so that the resumed run is the same."""
    if server.api == "sglang":  # which gets no seed
        server.drawn = lambda prompt, most, options: [(1, -1.0), (prompt[0] % 3, -2.0)]

    def run(folder):
        made = sampler(server, folder=tmp_path / "policy", save=save)
        saving = Checkpointer(tmp_path / folder, every=Every(iterations=1), keep_last=100)
        strategy = GRPOStrategy(2, 0.1, minibatch_epochs=2, minibatch_size=5)
        torch.manual_seed(0)
        rollouts = TextRollouts(PROMPTS, Reward(), max_new_tokens=4, prompts_per_rollout=5, sampler=made)
        settings = {"max_updates": 6, "learning_rate": 0.5, "seed": 3}
        return trainer(settings, model=Tokens(VOCABULARY), train_loader=rollouts, strategy=strategy, handlers=[saving])

    whole = run("whole")
    whole.train()
    for cut in (3, 4):
        again = run(f"again {cut}")
        again.train(resume=saved(tmp_path / "whole", cut))
        assert differences(again, whole) == set()


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_a_server_that_is_gone_is_named(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerError, match=rf"^ServerSampler\(url='{url}'\): the server cannot be reached") as caught:
        ServerSampler(url)([[1]], 2)
    assert isinstance(caught.value, ConnectionError)


def test_a_server_that_goes_during_a_run_ends_it_before_any_update(server):
    made = sampler(server)
    run, _, _ = texts(GRPOStrategy(2), sampler=made, updates=3, prompts_per_rollout=5)
    path = "/v1/completions" if server.api == "vllm" else "/generate"
    server.answers[path] = (500, {"error": "out of memory"})
    with pytest.raises(ServerError, match=rf"answered {path} with: status 500, .*out of memory") as caught:
        run.train()
    assert run.state.update == 0
    assert any("while drawing texts for 10 prompts" in note for note in caught.value.__notes__)


def test_a_server_that_is_too_slow_is_named_with_the_time(server):
    made = sampler(server, timeout=0.05)
    server.delay = 1.0
    with pytest.raises(ServerError, match=r"^ServerSampler\(timeout=0.05\): /.* took longer than 0.05 s; pass"):
        made([[1]], 2)


@pytest.mark.parametrize("answer", [{"choices": []}, {"meta_info": {}}, {}, [], b"<html>", {"data": []}])
def test_an_answer_that_is_not_one_is_named(server, answer):
    path = "/v1/completions" if server.api == "vllm" else "/generate"
    server.answers[path] = (200, answer)
    with pytest.raises(ServerError, match=rf"^ServerSampler\(url=.*\): answered {path} with: "):
        sampler(server)([[1]], 2)


def test_a_server_with_another_model_is_refused(server):
    with pytest.raises(ConfigurationError, match=r"^ServerSampler\(model='other'\): the server .* serves policy; pass"):
        sampler(server, model="other")([[1]], 2)
    assert len(sampler(server, model="policy")([[1]], 2)[0].tokens) == 2


def test_a_vllm_server_of_another_folder_is_refused(tmp_path):
    with text_server("vllm", tmp_path / "policy", VOCABULARY) as server:
        made = sampler(server, folder=tmp_path / "other", save=save)
        with pytest.raises(ConfigurationError, match=r"^ServerSampler\(folder=.*other.*\): .* reloads its own folder"):
            made.update_weights(Tokens(), 1)


def test_weights_that_the_server_did_not_load_are_reported(server, tmp_path):
    made = sampler(server, folder=tmp_path / "policy", save=save)
    if server.api == "vllm":
        server.answers["/collective_rpc"] = (404, {"detail": "Not Found"})
        message = r"/collective_rpc with: status 404, .*; set VLLM_SERVER_DEV_MODE=1 for it"
    else:
        server.answers["/update_weights_from_disk"] = (200, {"success": False, "message": "shapes differ"})
        message = r"/update_weights_from_disk with: shapes differ"
    with pytest.raises(ServerError, match=message):
        made.update_weights(Tokens(), 1)


def test_a_server_does_not_stop_at_sequences_of_tokens(server):
    message = refusal(lambda: sampler(server)([[1]], 2, sampling=Sampling(stop=[[1, 2]])))
    assert message.startswith("ServerSampler(stop=[(1, 2)]): a server stops at texts, not at sequences of tokens")
    assert server.requests == []


WRONG = [
    ({"url": "localhost:8000"}, "ServerSampler(url='localhost:8000'): needs a server, such as http://localhost:8000"),
    ({"url": "http://x/v1"}, "ServerSampler(url='http://x/v1'): needs a server"),
    ({"api": "tgi"}, "ServerSampler(api='tgi'): unknown; choose one of sglang, vllm"),
    ({"timeout": 0.0}, "ServerSampler(timeout=0.0): needs a positive number"),
    ({"concurrency": 0}, "ServerSampler(concurrency=0): needs a whole number of at least 1"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_arguments_out_of_range_are_refused(options, message):
    assert refusal(lambda: ServerSampler(**{"url": "http://x", **options})).startswith(message)


@pytest.mark.parametrize(("name", "value"), [("url", 3), ("save", "folder")])
def test_arguments_of_another_type_are_refused(name, value):
    message = refusal(lambda: ServerSampler(**{"url": "http://x", name: value}), TypeError)
    assert re.match(rf"ServerSampler\({name}={value!r}\): needs ", message)


@pytest.mark.parametrize("tokens", ["12", [1.5, 2], [None, 1]], ids=str)
def test_an_answer_with_tokens_that_are_not_numbers_is_named(tokens, tmp_path):
    with text_server("vllm", tmp_path, VOCABULARY) as server:
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": [-1.0, -1.0]}}
        server.answers["/v1/completions"] = (200, {"choices": [choice]})
        with pytest.raises(ServerError, match="answered /v1/completions with: no token_ids and logprobs"):
            sampler(server)([[1]], 2)


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_that_the_model_does_not_know_is_named(server, token):
    server.drawn = lambda prompt, most, options: [(token, -1.0)]
    model = Tokens(VOCABULARY)
    model.config = SimpleNamespace(vocab_size=VOCABULARY)
    run, _, _ = texts(GRPOStrategy(2), model=model, sampler=sampler(server), prompts_per_rollout=5)
    message = rf"a text of the sampler has the token {token}; .* the model's vocabulary has {VOCABULARY}; use the model"
    with pytest.raises(ValueError, match=message):
        run.train()
    assert run.state.update == 0


def test_weights_wait_until_texts_are_drawn(server, tmp_path):
    """A validation may give the server other weights while a thread draws the texts of the next rollout."""
    made = sampler(server, folder=tmp_path / "policy", save=save)
    begun, may_end, order = Event(), Event(), []

    def drawn(prompt, most, options):
        begun.set()
        assert may_end.wait(30.0)
        order.append("drawn")
        return [(1, -1.0)]

    def load(folder):
        order.append("loaded")

    server.drawn, server.load = drawn, load
    drawing = Thread(target=made, args=([[1]], 1))
    drawing.start()
    assert begun.wait(30.0)
    updating = Thread(target=made.update_weights, args=(Tokens(VOCABULARY), 1))
    updating.start()
    updating.join(0.2)  # without the lock, the server would load them now
    may_end.set()
    drawing.join()
    updating.join()
    assert order == ["drawn", "loaded"]
