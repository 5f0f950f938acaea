"""How fast a model writes: greedy decoding, one sequence at a time."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

from .perplexity import context_of

__all__ = ["Speed", "decode_speed"]


@dataclass(frozen=True)
class Speed:
    """``tokens_per_second`` at the median time of ``steps`` decoded tokens, ``first_token`` seconds for the prompt."""

    tokens_per_second: float
    first_token: float
    steps: int


def decode_speed(model: nn.Module, *, prompt: int = 16, steps: int = 32, repeats: int = 3) -> Speed:
    """Time greedy decoding at batch 1 behind ``prompt`` tokens, with a key-value cache, as users run it.

    One sequence of ``steps`` warms up, then ``repeats`` are timed token by token; the median leaves out whatever else
    the machine was doing. Raises ``ValueError`` where the model's context is too short for prompt and steps.
    """
    context = context_of(model)
    if prompt < 1 or steps < 1 or prompt + steps > context:
        raise ValueError(f"prompt and steps must be at least 1 and together at most {context}, got {prompt} and {steps}")
    device = next(model.parameters()).device
    ids = torch.arange(1, prompt + 1, device=device)[None]
    firsts: list[float] = []
    times: list[float] = []
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            first, each = _decode(model, ids, steps)
            if repeat:
                firsts.append(first)
                times += each
    return Speed(1 / statistics.median(times), statistics.median(firsts), len(times))


def _decode(model: nn.Module, ids: torch.Tensor, steps: int) -> tuple[float, list[float]]:
    """Seconds of the prompt and of each token behind it."""
    past, token, marks = None, ids, [_now(ids.device)]
    for _ in range(steps + 1):
        output = model(token, past_key_values=past, use_cache=True)
        past, token = output.past_key_values, output.logits[:, -1:].argmax(-1)
        marks.append(_now(ids.device))
    first, *rest = (after - before for before, after in itertools.pairwise(marks))
    return first, rest


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
