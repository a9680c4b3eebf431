"""The weights of examples/byte_lm's model in JAX's, and back."""

from collections.abc import Mapping

import jax
import numpy as np
import torch
from flax import nnx
from torch import Tensor

from examples.byte_lm_jax.model import ByteGPT


def load_torch_weights(model: ByteGPT, state_dict: Mapping[str, Tensor]) -> None:
    """Copy the weights of a torch ByteGPT of the same sizes into the model, which keeps its own dtypes.

    Args:
        state_dict: what the torch model's `state_dict()` gives.

    Raises:
        ValueError: names are missing or too many, or a shape differs; nothing has been copied then.
    """
    parameters = _by_torch_name(model)
    missing, unexpected = parameters.keys() - state_dict.keys(), state_dict.keys() - parameters.keys()
    if missing or unexpected:
        raise ValueError(
            f"load_torch_weights(state_dict with {len(state_dict)} names): lacks {sorted(missing)}, and the model has "
            f"no {sorted(unexpected)}; give it the state_dict() of a ByteGPT with as many layers"
        )
    for name, (parameter, is_transposed) in parameters.items():
        shape, given = parameter[...].shape[:: -1 if is_transposed else 1], tuple(state_dict[name].shape)
        if given != shape:
            raise ValueError(
                f"load_torch_weights(state_dict[{name!r}] of shape {given}): the model's is {shape}; make both models "
                "with the same sizes"
            )
    for name, (parameter, is_transposed) in parameters.items():
        weights = state_dict[name].detach().cpu().float().numpy()
        # array() copies; asarray() may share torch's memory, which torch's optimizer keeps writing to
        parameter[...] = jax.numpy.array(weights.T if is_transposed else weights, dtype=parameter[...].dtype)


def torch_weights(model: ByteGPT) -> dict[str, Tensor]:
    """Copy the model's weights, float32, by the names and in the shapes of a torch ByteGPT's state dict."""
    weights = {}
    for name, (parameter, is_transposed) in _by_torch_name(model).items():
        array = np.asarray(parameter[...], dtype=np.float32)
        weights[name] = torch.tensor(array.T if is_transposed else array)
    return weights


def _by_torch_name(model: ByteGPT) -> dict[str, tuple[nnx.Param, bool]]:
    """Each parameter by its name in torch, and whether it lies the other way: a kernel is (in, out), torch's (out, in).

    Kernel, scale and embedding are all called "weight" there.
    """
    return {
        ".".join(map(str, (*path[:-1], "bias" if path[-1] == "bias" else "weight"))): (parameter, path[-1] == "kernel")
        for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
