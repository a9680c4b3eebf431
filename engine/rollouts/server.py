"""A sampler that draws texts from a vLLM or SGLang server, and gives the server the policy's weights."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from torch import nn

from pulsetrain.engine.argument_checks import check_choice, check_positive, check_type, check_whole_number
from pulsetrain.engine.errors import ConfigurationError, PulsetrainError, refused
from pulsetrain.engine.rollouts.completions import Completion
from pulsetrain.engine.rollouts.drawing import Sampling, end_tokens_of

__all__ = ["ServerError", "ServerSampler"]


class ServerError(PulsetrainError, ConnectionError):
    """A server that does not answer, or answers something unusable."""


class ServerSampler:
    """Draws texts from a server, one request for each text, for `TextRollouts(sampler=...)`.

    The server returns each token's log-probability, by which `TextRollouts` weights the text, since the server computes
    with other kernels and precisions than the trainer. Before each rollout, the policy is saved to `folder`, and the
    server loads it from there:

    - vLLM, started by `VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --logprobs-mode processed_logprobs`. Without that mode,
      its log-probabilities lack the temperature. The server reloads its own folder, so `folder` has to be the same.
    - SGLang, started by `python -m sglang.launch_server --model-path ...`, loads any `folder`.

    vLLM gets a seed for each text. What a server draws also depends on its own batches, so that a run with a server is
    recorded and resumed, but not repeated bit for bit.

    >>> sampler = ServerSampler("http://localhost:8000", folder="policy")
    >>> sampler.url, sampler.api
    ('http://localhost:8000', 'vllm')

    Args:
        url: of the server, without a path.
        api: "vllm" or "sglang".
        model: the name of the model that the server has to serve; None accepts any.
        folder: for the weights, on a file system that the server sees, too; None does not change the server's weights.
        save: called as save(model, folder); the default is the model's `save_pretrained`. A model with adapters needs
            one that writes merged weights.
        timeout: seconds that a request may take.
        concurrency: the largest number of requests at a time.
        headers: of each request, such as {"Authorization": "Bearer ..."}.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    url: str
    api: str
    model: str | None
    timeout: float
    concurrency: int
    folder: Path | None

    def __init__(
        self,
        url: str,
        *,
        api: str = "vllm",
        model: str | None = None,
        folder: str | Path | None = None,
        save: Callable[[nn.Module, Path], object] | None = None,
        timeout: float = 600.0,
        concurrency: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url, self.api, self.model, self.timeout, self.concurrency = url, api, model, timeout, concurrency
        check_type("ServerSampler", "url", url, str, "text")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise refused(self, "needs a server, such as http://localhost:8000", "url")
        check_choice("ServerSampler", "api", api, ("vllm", "sglang"))
        check_type("ServerSampler", "save", save, Callable | None, "a function of a model and a folder")
        check_positive("ServerSampler", "timeout", timeout)
        check_whole_number("ServerSampler", "concurrency", concurrency)
        self.folder = None if folder is None else Path(folder).absolute()
        self._save, self._headers = save, {"Content-Type": "application/json", **(headers or {})}
        self._secure, self._place = parts.scheme == "https", parts.netloc
        self._drawing = Lock()  # a validation may ask for other weights while a thread draws
        self._served: str | None = None  # the model's name, once the server has been asked

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        end_token: int | Sequence[int] | None = None,
        sampling: Sampling | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Completion]:
        """The completion of each prompt, with the log-probabilities of its tokens.

        Raises:
            ServerError: the server cannot be reached, takes longer than the timeout, or does not return tokens.
            ConfigurationError: the server serves another model, or does not have a stop by token sequences.
        """
        sampling = sampling or Sampling()
        if not all(isinstance(each, str) for each in sampling.stop):
            rule = "a server stops at texts, not at sequences of tokens; pass texts, or several end tokens"
            raise ConfigurationError(rule, "ServerSampler", stop=list(sampling.stop))
        ends = list(end_tokens_of("ServerSampler", end_token))
        options: dict[str, Any] = {"temperature": temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
        options |= {"repetition_penalty": sampling.repetition_penalty, "stop_token_ids": ends}
        options |= {} if sampling.top_k is None else {"top_k": sampling.top_k}
        options |= {"stop": list(sampling.stop)} if sampling.stop else {}
        served = self._find_model()
        one = self._by_vllm if self.api == "vllm" else self._by_sglang
        numbers: list[int | None] = [None] * len(prompts) if seeds is None else list(seeds)

        def drawn(prompt: Sequence[int], seed: int | None) -> Completion:
            return one(served, list(prompt), max_new_tokens, options, seed)

        with (
            self._drawing,
            ThreadPoolExecutor(max_workers=self.concurrency, thread_name_prefix="ServerSampler") as pool,
        ):
            return list(pool.map(drawn, prompts, numbers))

    def update_weights(self, model: nn.Module, version: int) -> None:
        """Saves the policy, and lets the server load it; `TextRollouts` calls this before each rollout.

        Args:
            version: the number of the rollout.

        Raises:
            ServerError: the server cannot be reached, or did not load the weights.
            ConfigurationError: the model cannot be saved, or the server serves another folder.
        """
        if self.folder is None:
            return
        self._find_model()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._save is not None:
            self._save(model, self.folder)
        else:
            save = getattr(model, "save_pretrained", None)
            if not callable(save) or hasattr(model, "peft_config"):
                rule = f"{type(model).__name__} does not save itself whole; pass a function of the model and the folder"
                raise ConfigurationError(rule, "ServerSampler", save=None)
            save(self.folder)
        with self._drawing:
            if self.api == "vllm":
                self._ask("/collective_rpc", {"method": "reload_weights"})
                self._ask("/reset_prefix_cache", {})  # keys and values of prompts, by the weights before
                return
            given = {"model_path": str(self.folder), "flush_cache": True, "weight_version": str(version)}
            answer = self._ask("/update_weights_from_disk", given)
            if not answer.get("success"):
                raise self._unusable("/update_weights_from_disk", str(answer.get("message", answer)))

    # ---------------------------------------------------------------------------------------------------- one request

    def _by_vllm(
        self, served: str, prompt: list[int], most: int, options: Mapping[str, Any], seed: int | None
    ) -> Completion:
        # ignore_eos: only the end tokens of the rollouts end a text
        given = {
            "model": served, "prompt": prompt, "max_tokens": most, "logprobs": 0, "return_token_ids": True,
            "ignore_eos": True, "include_stop_str_in_output": True, **options,
        }  # fmt: skip
        if seed is not None:
            given["seed"] = seed % 2**63
        answer = self._ask("/v1/completions", given)
        try:
            (choice,) = answer["choices"]
            tokens, likely = map(operator.index, choice["token_ids"]), map(float, choice["logprobs"]["token_logprobs"])
            return Completion(list(tokens), list(likely))
        except (KeyError, TypeError, ValueError):
            raise self._unusable("/v1/completions", "no token_ids and logprobs; needs vLLM 0.10.2 or later") from None

    def _by_sglang(
        self, served: str, prompt: list[int], most: int, options: Mapping[str, Any], seed: int | None
    ) -> Completion:
        # with ignore_eos, its stop tokens would not end a text either
        drawn = {"max_new_tokens": most, "ignore_eos": not options["stop_token_ids"], "no_stop_trim": True, **options}
        answer = self._ask("/generate", {"input_ids": prompt, "sampling_params": drawn, "return_logprob": True})
        try:
            found = [(int(each[1]), float(each[0])) for each in answer["meta_info"]["output_token_logprobs"]]
        except (KeyError, TypeError, ValueError, IndexError):
            raise self._unusable("/generate", "no output_token_logprobs") from None
        return Completion([token for token, _ in found], [log_prob for _, log_prob in found])

    def _find_model(self) -> str:
        """The name of the model that the server serves; it is asked once."""
        if self._served is None:
            path = "/v1/models" if self.api == "vllm" else "/get_model_info"
            answer = self._ask(path, None)
            try:
                served = answer["data"] if self.api == "vllm" else [{"id": answer["model_path"]}]
                names = {str(each["id"]): each.get("root") for each in served}
                name = next(iter(names)) if self.model is None else self.model
            except (KeyError, TypeError, AttributeError, StopIteration):
                raise self._unusable(path, "no model") from None
            if name not in names:
                rule = f"the server at {self.url} serves {', '.join(names)}; pass one of these, or start it with this"
                raise refused(self, rule, "model")
            root = names[name]
            if root is not None and self.folder is not None and Path(root).absolute() != self.folder:
                rule = f"the server at {self.url} reloads its own folder, {root}; start it with this one, or pass that"
                raise refused(self, rule, "folder")
            self._served = name
        return self._served

    def _ask(self, path: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The answer of the server, JSON; without anything given, it is a GET."""
        connection = (HTTPSConnection if self._secure else HTTPConnection)(self._place, timeout=self.timeout)
        try:
            body = None if given is None else json.dumps(given)
            connection.request("GET" if given is None else "POST", path, body, self._headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except TimeoutError:
            raise ServerError(
                f"{path} took longer than {self.timeout:g} s; pass a larger one, or ask for fewer tokens",
                "ServerSampler",
                timeout=self.timeout,
            ) from None
        except (OSError, HTTPException) as error:
            raise ServerError(
                f"the server cannot be reached ({type(error).__name__}: {error}); start it, or pass its address",
                "ServerSampler",
                url=self.url,
            ) from error
        finally:
            connection.close()
        if response.status >= 400:
            hint = "; set VLLM_SERVER_DEV_MODE=1 for it" if response.status == 404 and self.api == "vllm" else ""
            raise self._unusable(path, f"status {response.status}, {text[:300]}{hint}")
        try:
            answer = json.loads(text) if text else {}
        except ValueError:
            raise self._unusable(path, text[:300]) from None
        return answer if isinstance(answer, dict) else {}

    def _unusable(self, path: str, answer: str) -> ServerError:
        return ServerError(f"answered {path} with: {answer}", "ServerSampler", url=self.url)
