"""Trains the small model on the invented encyclopedia and saves it in the form that transformers loads.

    python -m lowbit.evals.toy.train

The defaults are the settings of the committed model, whose log is `training.jsonl`. That run was given 390 seconds
(`--seconds 390`) and took 12,396 steps in them, so its log's `steps` had no effect, nor had its empty `drop`, which is no
setting any more. With the steps given instead, the learning rate falls by steps rather than by the clock: nowhere more
than a hundredth of the run apart. A GPU adds in another order every time, so that another run ends at other weights; how
far the accuracy moves from run to run was not measured. There is little to spare: a run of as many seconds with one layer
fewer ended at 62 % instead of 97 %.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..exam import LETTERS, Question
from ..harness import ask, scores_of
from ..results import replace_file
from ..tasks import MMLU, suite_of
from .corpus import SEPARATOR, edition
from .corpus import exam as questions_of
from .world import ENTITIES, SEED, World, build

CONTEXT = 512
"""Tokens that the model sees at most."""

ANSWER_WEIGHT = 8.0
"""How much more a token that answers an exam question counts in the loss: it is one of about seventy."""

Report = Callable[[dict[str, Any]], None]


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of `vocabulary` tokens learned from `texts`.

    Raises ValueError where " A" to " D" did not become one token each, since the exam reads their logits.
    """
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    missing = [letter for letter in LETTERS if inner.token_to_id(f"Ġ{letter}") is None]
    if missing:
        raise ValueError(f"answers {missing} are no single tokens; use a larger vocabulary than {vocabulary}")
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=SEPARATOR, pad_token=SEPARATOR, model_max_length=CONTEXT)


def architecture(vocabulary: int, width: int, hidden: int, layers: int, separator: int) -> LlamaConfig:
    """Return the configuration of a Llama of that `width`, with heads of 32 and half as many key-value heads."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=separator,
        pad_token_id=separator,
    )


def tokens_of(world: World, editions: int, seed: int, tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Return the token ids of that many editions, one after the other, and the places where documents start."""
    separator = tokenizer.eos_token_id
    ids: list[int] = []
    starts: list[int] = []
    for number in range(editions):
        for encoding in tokenizer.backend_tokenizer.encode_batch(list(edition(world, number, seed))):
            starts.append(len(ids))
            ids += [*encoding.ids, separator]
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(starts)


class Windows:
    """Draws windows of `CONTEXT` + 1 tokens: three of four start with a document, as a prompt does."""

    def __init__(self, ids: Tensor, starts: Tensor, batch: int, seed: int, device: str) -> None:
        self._ids = ids.to(device)
        last = len(ids) - CONTEXT - 1
        self._starts = starts[starts < last].to(device)
        self._last = last
        self._batch = batch
        self._offsets = torch.arange(CONTEXT + 1, device=device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def draw(self) -> Tensor:
        """Return ids of shape [batch, CONTEXT + 1]."""
        free = self._batch // 4
        device = self._ids.device
        picks = torch.randint(len(self._starts), (self._batch - free,), generator=self._generator, device=device)
        anywhere = torch.randint(self._last, (free,), generator=self._generator, device=device)
        begins = torch.cat([self._starts[picks], anywhere])
        return self._ids[begins[:, None] + self._offsets].long()


def _loss(model: nn.Module, ids: Tensor, colon: int, letters: Tensor) -> Tensor:
    given, wanted = ids[:, :-1], ids[:, 1:]
    logits = model(given, use_cache=False).logits
    losses = cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="none")
    answers = ((given == colon) & torch.isin(wanted, letters)).flatten()
    weights = torch.where(answers, ANSWER_WEIGHT, 1.0)
    return (losses * weights).sum() / weights.sum()


def _optimizer(model: nn.Module, rate: float, fused: bool) -> torch.optim.Optimizer:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def fit(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    windows: Windows,
    sample: list[Question],
    steps: int,
    rate: float,
    report: Report,
    seconds: float | None = None,
) -> int:
    """Train `model` in place and return the steps taken: `steps`, or as many as fit into `seconds`.

    The learning rate rises to `rate` over the first fiftieth and then falls in a line to zero. Every fiftieth the loss is
    reported, every tenth also the share of `sample` that the model answers.
    """
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    optimizer = _optimizer(model, rate, cuda)
    letters = torch.tensor(tokenizer.convert_tokens_to_ids([f"Ġ{x}" for x in LETTERS]), device=device)
    colon = tokenizer.convert_tokens_to_ids(":")
    loss_of = torch.compile(_loss) if cuda else _loss
    began = time.monotonic()
    marks = 0
    step = 0
    loss = torch.zeros(())
    while True:
        # A budget of seconds counts from the second step on, when everything is compiled.
        began = time.monotonic() if step == 1 else began
        progress = (time.monotonic() - began) / seconds if seconds and step else step / steps
        done = progress >= 1
        if progress * 50 >= marks or done:
            marks = int(progress * 50) + 1
            row: dict[str, Any] = {"step": step, "progress": round(progress, 4)}
            if step:
                row["loss"] = round(loss.item(), 4)
                row["seconds"] = round(time.monotonic() - began, 1)
            if step and (marks % 5 == 1 or done):
                with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                    row["exam"] = round(share_of(model, tokenizer, sample), 4)
            report(row)
        if done:
            return step
        for group in optimizer.param_groups:
            group["lr"] = rate * min(progress * 50 + 1e-3, (1 - progress) / 0.98)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = loss_of(model, windows.draw(), colon, letters)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write `model` in bf16 with its tokenizer and generation settings to `folder`."""
    separator = tokenizer.eos_token_id
    model.bfloat16()
    model.generation_config = GenerationConfig(eos_token_id=separator, pad_token_id=separator, max_new_tokens=128)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def share_of(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[Question]) -> float:
    """The share of `questions` that `model` answers right."""
    suite = suite_of(questions)
    return scores_of(ask(model, tokenizer, suite, batch=64), suite)[MMLU].value


def main() -> None:
    """Train the small model on the invented encyclopedia and save it for transformers."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=here / "model", help="folder of the model")
    parser.add_argument("--log", type=Path, default=here / "training.jsonl")
    parser.add_argument("--steps", type=int, default=12396)
    parser.add_argument("--seconds", type=float, help="train for this long instead of a number of steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order of the texts")
    parser.add_argument("--world", type=int, default=SEED, help="seed of the encyclopedia and its exam")
    parser.add_argument("--entities", type=int, default=ENTITIES, help="entities a subject")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--editions", type=int, default=16, help="editions of the encyclopedia to draw from")
    parser.add_argument("--batch", type=int, default=64, help="windows a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--hidden", type=int, default=384, help="width inside the feed-forward blocks")
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()

    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        replace_file(arguments.log, "".join(json.dumps(r) + "\n" for r in rows))

    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "log", "device")}
    device = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else platform.machine()
    versions = {m.__name__: m.__version__ for m in (torch, transformers, tokenizers)}
    report({**settings, "device": device, "python": platform.python_version(), **versions})
    train(arguments, report)


def train(arguments: argparse.Namespace, report: Report) -> None:
    """Do what the command line `arguments` of `main` say, from the world to the saved model."""
    began = time.monotonic()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    world = build(arguments.world, arguments.entities)
    papers = questions_of(world, arguments.world)
    tests = [question for paper in papers.values() for question in paper[5:]]
    texts = (text for number in range(2) for text in edition(world, number, arguments.seed))
    tokenizer = train_tokenizer(texts, arguments.vocabulary)
    config = architecture(len(tokenizer), arguments.width, arguments.hidden, arguments.layers, tokenizer.eos_token_id)
    model = LlamaForCausalLM(config).to(arguments.device)
    ids, starts = tokens_of(world, arguments.editions, arguments.seed, tokenizer)
    report(
        {
            "facts": len(world.facts),
            "tokens": len(ids),
            "parameters": sum(p.numel() for p in model.parameters()),
            "prepared": round(time.monotonic() - began, 1),
        }
    )
    windows = Windows(ids, starts, arguments.batch, arguments.seed, arguments.device)
    steps = fit(model, tokenizer, windows, tests[::8], arguments.steps, arguments.rate, report, arguments.seconds)
    save(model, tokenizer, arguments.out)
    share = share_of(model, tokenizer, tests)
    report({"steps": steps, "exam": round(share, 4), "seconds": round(time.monotonic() - began, 1)})


if __name__ == "__main__":
    main()
