"""What detection adds to a whole training step: views, encoder, loss, backward, optimiser.
resnet10, 32×32, batch 128; for image and text resnet10 of width 32, 64×64, and a transformer of
three layers, batch 256.

    .venv/bin/python benchmarks/overhead.py

Each pair of methods takes its steps in turn on the same batches; the overhead is the median over
steps of the difference, in percent of the plain step, so that slow phases of the machine fall on
both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import verdict

from kinfolk.data.views import Views
from kinfolk.frameworks import MoCo
from kinfolk.frameworks.registry import Context, build, parse
from kinfolk.models import build_encoder, build_text, projection_head

PAIRS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("sogclr", "sogclr+glofnd", {"alpha": 0.01, "init": "quantile"}),
    ("simclr", "simclr+fnc", {"alpha": 0.01}),
    ("simclr", "simclr+glofnd", {"alpha": 0.01, "init": "quantile"}),
    ("simclr", "simclr+oracle", {}),
    ("simclr", "simclr+guide", {"features": None, "alpha": 0.01}),
    ("simclr", "simclr+guide:attract", {"features": None, "temperature": 0.1}),
    ("moco", "moco+guide", {"features": None, "alpha": 0.01}),
    ("simclr", "simclr, prior and hardness", {"prior": 0.1, "hardness": 0.5}),
    ("simclr", "simclr+teacher", {}),
    ("simclr", "simclr+components", {}),
    ("clip", "clip+guide:reweight", {"temperature": 0.1}),
    ("clip", "clip+glofnd", {"alpha": 0.001, "init": "quantile"}),
    ("fastclip", "fastclip+glofnd", {"alpha": 0.001, "init": "quantile"}),
)
LIMIT, BATCH, TEXT_BATCH = 2.0, 128, 256


def stepper(
    method: str, arguments: dict[str, Any], pixels: torch.Tensor, batch: int, compiles: bool
) -> Callable[[int], None]:
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", stem="cifar", width=16)
    labels = torch.arange(len(pixels)) % 10
    # what follows a comma names settings of the framework
    method, _, settings = method.partition(",")
    own, arguments = (arguments, {}) if settings else ({}, arguments)
    if "features" in arguments:
        arguments = {**arguments, "features": torch.randn(len(pixels), 512).half()}
    head = projection_head(encoder.output_size, encoder.output_size, 128)
    framework = build(
        parse(method),
        encoder,
        head,
        Context(len(pixels), labels),
        {"compile": compiles, **own},
        arguments,
    )
    framework.objective.set_eval_labels(labels)
    if isinstance(framework, MoCo):  # the queue of a training is full
        number = len(framework.queue.features)
        framework.queue.push(
            torch.nn.functional.normalize(torch.randn(number, 128), dim=1),
            torch.arange(number) % len(pixels),
        )
    framework.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(framework.parameters(), lr=0.03, momentum=0.9)
    views = Views("simclr", 32)

    def step(number: int) -> None:
        g = torch.Generator().manual_seed(number)
        ids = torch.randperm(len(pixels), generator=g)[:batch]
        made = views(pixels[ids], g, num_views=framework.num_views, weak=framework.weak_views)
        made = made.flatten(0, 1).contiguous(memory_format=torch.channels_last).view_as(made)
        optimizer.zero_grad(set_to_none=True)
        framework(made, ids).backward()
        optimizer.step()
        framework.after_step()

    return step


def text_stepper(
    method: str, arguments: dict[str, Any], pixels: torch.Tensor, batch: int, compiles: bool
) -> Callable[[int], None]:
    """As `stepper`, for images with captions of 32 tokens."""
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", stem="imagenet", width=32)
    text = build_text(
        "transformer", vocab_size=4096, context=32, end_id=4095, width=192, layers=3, heads=6
    )
    heads = [
        projection_head(size, size, 128, layers=1, bias=False)
        for size in (encoder.output_size, 192)
    ]
    framework = build(
        parse(method),
        encoder,
        heads[0],
        Context(len(pixels), text=(text, heads[1])),
        {"compile": compiles},
        arguments,
    )
    encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(framework.parameters(), lr=1e-3)
    views, tokens = Views("clip", 64), torch.randint(0, 4095, (len(pixels), 32))
    tokens[:, -1] = 4095

    def step(number: int) -> None:
        g = torch.Generator().manual_seed(number)
        ids = torch.randperm(len(pixels), generator=g)[:batch]
        made = views(pixels[ids], g, num_views=1)
        made = made[0].contiguous(memory_format=torch.channels_last).unsqueeze(0)
        optimizer.zero_grad(set_to_none=True)
        framework(made, ids, tokens[ids], ids).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="What detection adds to a training step.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument(
        "--only", default="", help="plain methods to take, with commas between; all where left out"
    )
    options = parser.parse_args()
    torch.set_num_threads(2)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; batch {BATCH}, labels"
        f" watched; image and text: {TEXT_BATCH}, none"
    )
    print(f"{options.steps} interleaved steps each")
    for plain, detecting, arguments in PAIRS:
        if options.only and plain not in options.only.split(","):
            continue
        of_text = plain in ("clip", "fastclip")
        size, make, batch = (64, text_stepper, TEXT_BATCH) if of_text else (32, stepper, BATCH)
        pixels = torch.randint(0, 256, (4096, size, size, 3), dtype=torch.uint8)
        for compiles in (False, True):
            steps = {
                name: make(name, given, pixels, batch, compiles)
                for name, given in ((plain, {}), (detecting, arguments))
            }
            base, overhead = measured(steps, plain, detecting, options.steps)
            mode = "compiled" if compiles else "eager"
            print(
                f"{plain:8} {mode:8}{base * 1e3:7.1f} ms   {detecting:26} {overhead:+5.1f} %  "
                f" {verdict(overhead, LIMIT)} %"
            )


def measured(
    steps: dict[str, Callable[[int], None]], plain: str, detecting: str, number: int
) -> tuple[float, float]:
    """Seconds of a plain step, and what detection adds to it in percent."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for at in range(number + 10):
        for name in list(steps) if at % 2 else list(steps)[::-1]:
            start = time.perf_counter()
            steps[name](at)
            if at >= 10:
                times[name].append(time.perf_counter() - start)
    base = statistics.median(times[plain])
    return (
        base,
        100
        * statistics.median(b - a for a, b in zip(times[plain], times[detecting], strict=True))
        / base,
    )


if __name__ == "__main__":
    main()
