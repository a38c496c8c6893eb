"""Training of a small language model on the source of Python's standard library, on any number of ranks.

    python examples/train_gpt.py                                      # one process
    echelon run -n 4 examples/train_gpt.py --dp 2 --pp 2              # 2 copies of the model, each in 2 stages
    torchrun --nproc-per-node 4 examples/train_gpt.py --dp 2 --pp 2   # the same, under torchrun
    python examples/train_gpt.py --simulate 4 --dp 2 --pp 2           # the same, on simulated ranks

With --checkpoint DIR it saves beside training. Kill it and start the command again, also with other ranks, --dp and
--pp: it goes on after the last step that was saved. With --check it trains for a few steps, then trains the same model
in one process and compares.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from gpt import Text, Windows, even_windows, loss_of, make_gpt, random_windows, read_text, unigram_loss
from torch import Tensor, nn

import echelon
from echelon import Mesh, ProcessGroup
from echelon.checkpoint import Store
from echelon.pipeline import Pipeline
from echelon.timeline.timeline import Timeline

TOLERANCE = 1e-9
"""Largest difference of losses and weights that --check allows. In float64 a mistake shows at 1e-4 and above."""


def train(options: argparse.Namespace) -> None:
    # The ranks form a grid. Each row holds the stages of one copy of the model, each column one stage of all copies.
    group = echelon.init()
    dp, pp = grid(group.world_size, options)
    mesh = Mesh(group, dp=dp, pp=pp)
    say = print if group.rank == 0 else silent

    text = read_text()
    validation = even_windows(text.validation, options.validation_windows, options.context)
    unigram = unigram_loss(text.training, validation.target)
    model = make_model(options)
    say(f"{count(model.parameters()):,} parameters: {dp} copies x {pp} stages, {options.microbatches} microbatches")
    say(f"{len(text.training) / 1e6:.1f} MB of Python to learn from; byte frequencies alone give {per_byte(unigram)}")

    # The pipeline keeps only this rank's part of the model. The rest is an ordinary training loop.
    pipe = Pipeline(
        model,
        mesh["pp"],
        schedule=options.schedule,
        num_microbatches=options.microbatches,
        loss_fn=loss_of,
        data_parallel=mesh["dp"],
    )
    optimizer = make_optimizer(pipe.parameters())
    store = Store(options.checkpoint, keep=2) if options.checkpoint else None
    first = (store.load(model=pipe, optimizer=optimizer) or 0) if store else 0
    if first:
        say(f"going on after step {first} of {options.checkpoint}")

    losses = {}
    progress = Progress(say, options, first)
    for step in range(first, options.steps):
        batch = share(batch_of(text, step, options), mesh)
        loss = pipe.step(batch.inputs, target=batch.target).loss  # adds to .grad, as loss.backward() does
        pipe.clip_grad_norm_(1.0)
        set_learning_rate(optimizer, step, options)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        progress.report(step + 1, losses[step], pipe)
        if store and ((step + 1) % options.save_every == 0 or step + 1 == options.steps):
            store.save(step + 1, model=pipe, optimizer=optimizer, wait=False)
    if store:
        store.close()  # waits until the last checkpoint is on disk

    # Validation and sampling communicate, so all ranks run them. Only rank 0 prints.
    say(f"\ntrained for {progress.seconds:.0f} s; validation loss, on modules it has not seen:")
    say(f"  this model              {per_byte(validate(pipe, group, share(validation, mesh), options.batch))}")
    say(f"  byte frequencies alone  {per_byte(unigram)}")
    if options.sample:
        say(f"\nit continues {options.prompt!r}:\n\n{sample(pipe, mesh['pp'], options)}\n")
    if group.rank == 0:
        draw(pipe, options.out / "train_gpt.png")
    if options.check:
        check(pipe, mesh, text, losses, options)


def silent(_: str) -> None:
    """Prints nothing: only rank 0 reports."""


class Progress:
    """Progress report: step, loss, speed, time left, and the measured and predicted bubble rate."""

    def __init__(self, say: Callable[[str], None], options: argparse.Namespace, first: int) -> None:
        self._say = say
        self._options = options
        self._begin = self._last_time = time.perf_counter()
        self._first = self._last_step = first
        say(f"\n{'step':>9} {'loss':>8} {'tokens/s':>9} {'time left':>10}   {'bubble: measured':>16} {'predicted':>9}")

    @property
    def seconds(self) -> float:
        """Seconds since the training began."""
        return time.perf_counter() - self._begin

    def report(self, step: int, loss: float, pipe: Pipeline) -> None:
        last, every = self._options.steps, self._options.report_every
        if step % every and step not in (self._first + 1, last):
            return
        now = time.perf_counter()
        steps_per_second = (step - self._last_step) / (now - self._last_time)
        self._last_step, self._last_time = step, now
        speed = steps_per_second * self._options.batch * self._options.context
        left = (last - step) / steps_per_second
        measured, predicted = pipe.timeline.bubble_rate, plan(pipe).bubble_rate
        place = f"{step}/{last}"
        self._say(f"{place:>9} {loss:8.3f} {speed:9,.0f} {left:8.0f} s   {measured:16.0%} {predicted:9.0%}")


def grid(world_size: int, options: argparse.Namespace) -> tuple[int, int]:
    """Returns dp and pp. If one is not given, it follows from the other."""
    dp = options.dp if options.dp is not None else world_size // max(1, options.pp or 1)
    return dp, options.pp if options.pp is not None else world_size // max(1, dp)


def make_model(options: argparse.Namespace) -> nn.Sequential:
    # In float64 rounding is far below the effect of a mistake, so --check can tell them apart.
    dtype = torch.float64 if options.check else torch.float32
    return make_gpt(options.layers, options.width, options.heads, options.context).to(dtype)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.1)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, options: argparse.Namespace) -> None:
    """Sets a rate that rises for 20 steps, then falls to nearly zero along half a cosine."""
    decay = 0.525 + 0.475 * math.cos(math.pi * step / options.steps)
    for parameters in optimizer.param_groups:
        parameters["lr"] = options.learning_rate * min(1.0, (step + 1) / 20) * decay


def batch_of(text: Text, step: int, options: argparse.Namespace) -> Windows:
    """Returns the batch of a step, the same on every rank."""
    return random_windows(text.training, options.batch, options.context, seed=step)


def share(windows: Windows, mesh: Mesh) -> Windows:
    """Returns the samples of this rank's copy of the model."""
    return Windows(*(part.tensor_split(mesh.shape["dp"])[mesh.coordinates["dp"]] for part in windows))


def plan(pipe: Pipeline) -> Timeline:
    """Simulates the schedule with the times and the memory of the last step, in seconds and bytes."""
    return pipe.schedule.simulate(pipe.costs())


def validate(pipe: Pipeline, group: ProcessGroup, windows: Windows, batch: int) -> float:
    """Returns the mean loss over the windows of all ranks."""
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, target in zip(windows.inputs.split(batch), windows.target.split(batch), strict=True):
        scores = pipe.forward(inputs)
        if scores is not None:  # on the rank that holds the last stage
            total += torch.tensor([loss_of(scores, target) * target.numel(), target.numel()])
    group.all_reduce(total)
    return (total[0] / total[1]).item()


def sample(pipe: Pipeline, stages: ProcessGroup, options: argparse.Namespace) -> str:
    """Continues the prompt byte by byte. The last stage draws each byte and broadcasts it."""
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor(list(options.prompt.encode()))
    for _ in range(options.sample):
        scores = pipe.forward(text[None, -options.context :])
        following = torch.zeros(1, dtype=torch.int64)
        if scores is not None:
            following = torch.multinomial(torch.softmax(scores[0, -1] / 0.8, dim=0), 1, generator=generator)
        text = torch.cat([text, stages.broadcast(following, src=stages.world_size - 1)])
    return bytes(text.tolist()).decode(errors="replace")


def draw(pipe: Pipeline, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        pipe.timeline.draw(path, against=plan(pipe))
        print(f"the last step as planned and, below, as it ran: {path}")
    except echelon.EchelonError as error:
        print(f"no picture of the last step: {error}")


def check(pipe: Pipeline, mesh: Mesh, text: Text, losses: dict[int, float], options: argparse.Namespace) -> None:
    """Trains the same model on the same batches in one process and compares. Ends the program if they differ."""
    weights = gather_weights(pipe, mesh["pp"])
    if mesh.group.rank != 0:
        return
    model = make_model(options)
    optimizer = make_optimizer(model.parameters())
    loss_error = 0.0
    for step in range(options.steps):
        loss = accumulate_gradients(model, batch_of(text, step, options), mesh.shape["dp"], options)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        set_learning_rate(optimizer, step, options)
        optimizer.step()
        optimizer.zero_grad()
        loss_error = max(loss_error, abs(loss - losses.get(step, loss)))  # the steps of this start of the program
    weight_error = max((weights[name] - value).abs().max().item() for name, value in model.state_dict().items())

    print(f"\nagainst one process, after {options.steps} steps in {next(model.parameters()).dtype}:")
    print(f"  largest difference of losses   {loss_error:.1e}\n  largest difference of weights  {weight_error:.1e}")
    if not max(loss_error, weight_error) <= TOLERANCE:
        sys.exit(f"  that is more than rounding, {TOLERANCE:.0e}: the ranks did not train the same model")
    print(f"  that is rounding: at most {TOLERANCE:.0e}")


def gather_weights(pipe: Pipeline, stages: ProcessGroup) -> dict[str, Tensor]:
    """Returns the weights of the whole model, from the ranks that hold its stages."""
    mine = pipe.state_dict()
    shapes = [[name, list(value.shape)] for name, value in mine.items()]
    all_shapes = [item for part in stages.all_gather_object(shapes) for item in part]
    flat = stages.all_gather(torch.cat([value.flatten() for value in mine.values()]))
    values = flat.split([math.prod(shape) for _, shape in all_shapes])
    return {name: value.view(shape) for (name, shape), value in zip(all_shapes, values, strict=True)}


def accumulate_gradients(model: nn.Module, batch: Windows, dp: int, options: argparse.Namespace) -> float:
    """Runs forward and backward over the microbatches of all ranks. Returns the loss of the batch."""
    total = 0.0
    for copy in zip(*(part.tensor_split(dp) for part in batch), strict=True):
        for inputs, target in zip(*(part.tensor_split(options.microbatches) for part in copy), strict=True):
            loss = loss_of(model(inputs), target) * (len(inputs) / options.batch)
            loss.backward()
            total += loss.item()
    return total


def per_byte(nats: float) -> str:
    return f"{nats:.3f} nats = {nats / math.log(2):.3f} bits per byte"


def count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small language model on Python's standard library.")
    parser.add_argument("--dp", type=int, help="copies of the model (default: ranks / pp)")
    parser.add_argument("--pp", type=int, help="stages of each copy (default: ranks / dp)")
    parser.add_argument("--schedule", default="1f1b", choices=["gpipe", "1f1b"], help="pipeline schedule")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches per copy")
    parser.add_argument("--simulate", type=int, metavar="RANKS", help="run on simulated ranks in this process")
    parser.add_argument("--check", action="store_true", help="compare with a single process (10 steps, float64)")
    parser.add_argument("--steps", type=int, help="training steps (default: 400, with --check 10)")
    parser.add_argument("--batch", type=int, default=32, help="samples per step, over all copies")
    parser.add_argument("--context", type=int, default=64, help="bytes per sample")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks")
    parser.add_argument("--width", type=int, default=144, help="width of the hidden state")
    parser.add_argument("--heads", type=int, default=4, help="number of attention heads")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--validation-windows", type=int, default=800, help="samples to validate with")
    parser.add_argument("--report-every", type=int, default=20, metavar="STEPS", help="steps between reports")
    parser.add_argument("--sample", type=int, default=300, metavar="BYTES", help="bytes of text to generate at the end")
    parser.add_argument("--prompt", default="class ", help="start of the generated text")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save here, and go on from what is here")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS", help="steps from one save to the next")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="folder for the picture")
    options = parser.parse_args(arguments)
    if options.steps is None:
        options.steps = 10 if options.check else 400
    if min(options.steps, options.report_every, options.save_every) < 1 or not options.prompt:
        parser.error("give --steps, --report-every and --save-every 1 or more, and --prompt some text")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.simulate is None:
        train(options)
    else:
        echelon.simulate(train, options.simulate, (options,), costs="measured")


if __name__ == "__main__":
    main()
