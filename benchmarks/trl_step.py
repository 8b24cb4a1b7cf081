"""A training step of this learner against one of TRL's GRPOTrainer, on the CPU.

    pip install trl datasets        # into a copy of the environment; the project does not need them
    OMP_NUM_THREADS=1 PYTHON -I benchmarks/trl_step.py --rounds 5 --json out.json

Each way is a process of its own with the same weights, the same rollouts and AdamW; they take turns, one step each, so that
what else the machine does meets all. TRL's steps are those of `GRPOTrainer.train()` (shuffle, split, loss, accumulation,
clipping, optimizer, its metrics); only its rollouts are handed to it in place of generated ones. The benchmark fails if the
ways do not have the same loss and the same gradient. Docs: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anabranch.deploy.summary import machine_facts
from anabranch.learner import bench_step
from anabranch.learner.bench_packing import BenchRollouts
from anabranch.learner.bench_step import Meter, OwnStep, StepModel
from anabranch.learner.bench_step_report import Turn, as_table, summarise
from anabranch.learner.bench_turns import Link, Worker
from anabranch.schemas.config import LearnerSection

HOW_TO_GET = "TRL is not installed here: pip install trl datasets (into a copy of the environment)"
MODELS = {"tiny": StepModel(64, 2, 1024), "small": StepModel(256, 6, 49152), "medium": StepModel(512, 12, 49152),
          "large": StepModel(576, 30, 49152), "wide": StepModel(384, 8, 151936)}  # fmt: skip
PAD = 0


@dataclass(frozen=True)
class Way:
    trl: bool
    says: str
    learner: dict[str, Any] = field(default_factory=dict)  # of the learner's section, or GRPOConfig
    whole_budget: bool = False  # as many positions in a pass as TRL, not as many passes
    completions_only: bool = False


WAYS = {
    "trl": Way(
        True, "TRL's default; a step projects prompts and padding to the vocabulary too, as it does without a GPU"
    ),
    "trl-completions": Way(True, "the same, projecting completions only, as on a GPU", completions_only=True),
    "trl-recompute": Way(
        True, "that with gradient checkpointing, TRL's default", {"gradient_checkpointing": True}, completions_only=True
    ),
    "anabranch": Way(False, "the learner's defaults (packed, shared prompts), as many passes as TRL"),
    "anabranch-budget": Way(False, "the same, as many positions in a pass as TRL", whole_budget=True),
    "anabranch-packed": Way(
        False, "packed, prompts not shared, that budget", {"share_prompts": False}, whole_budget=True
    ),
    "anabranch-padded": Way(False, "padded rows, that budget", {"packing": False}, whole_budget=True),
    "anabranch-fused": Way(
        False,
        "`anabranch` with torch's fused AdamW, as TRL has",
        {"deepspeed": {"optimizer": {"params": {"fused": True}}}},
    ),
    "anabranch-recompute": Way(
        False, "packed, shared, with gradient checkpointing, as many passes as TRL", {"gradient_checkpointing": True}
    ),
}


@dataclass(frozen=True)
class Task:
    """What all ways are given."""

    model: dict[str, int]
    rollouts: dict[str, Any]
    positions: int
    dtype: str
    lr: float
    threads: int
    zero_stage: int


def write_gradients(path: Path, gradients: Iterator[tuple[str, Any]]) -> None:
    with path.open("wb") as out:
        for _, gradient in gradients:
            np.ascontiguousarray(gradient, np.float32).tofile(out)


def run_own(way: Way, task: Task, folder: Path, link: Link, gradients: Path) -> None:
    batch = bench_step.step_batch(BenchRollouts(**task.rollouts), task.model["vocabulary"])
    rows = bench_step.rows_within(batch, task.positions)
    passes = len(batch.lengths) // rows
    budget = rows * int(batch.prompt_lengths.max() + batch.lengths.max())
    if not way.whole_budget:
        budget = bench_step.budget_of_passes(StepModel(**task.model), batch, passes)
    section = LearnerSection(
        dtype=task.dtype, compute_dtype=task.dtype, zero_stage=task.zero_stage, micro_batch_tokens=budget, lr=task.lr,
        betas=bench_step.BETAS, threads=task.threads, **way.learner,
    )  # fmt: skip
    side, meter = OwnStep(folder, batch, section), Meter()
    link.answer(**side.facts, budget=budget)
    first = True
    while link.wait():
        meter.begin()
        said = side.step()
        link.answer(**meter.end(), **said)
        if first:
            write_gradients(gradients, side.gradients())
        first = False


class _Over(Exception):
    """The way out of TRL's loop."""


def run_trl(way: Way, task: Task, folder: Path, link: Link, gradients: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import utils

    from anabranch.learner.tiny_model import build_tokenizer

    if way.completions_only:
        if not hasattr(utils, "_use_triton"):
            raise SystemExit("this version of TRL says elsewhere what it projects; known: 1.16")
        utils._use_triton = lambda device: True  # asked there for this alone; the kernels ask for themselves
    rollouts = BenchRollouts(**task.rollouts)
    batch = bench_step.step_batch(rollouts, task.model["vocabulary"])
    prepared = {key: torch.from_numpy(np.ascontiguousarray(value)) if value.ndim else torch.tensor(int(value))
                for key, value in bench_step.as_padded_halves(batch, PAD).items()}  # fmt: skip
    rows = bench_step.rows_within(batch, task.positions)
    passes = len(batch.lengths) // rows
    torch.set_num_threads(task.threads)
    spent = {"backward": 0.0, "loss": 0.0}

    class Trainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return dict(prepared)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            spent["loss"] += float(loss.detach())
            return loss

    class Turns(TrainerCallback):
        meter, first = Meter(), True

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not link.wait():
                raise _Over
            spent.update(backward=0.0, loss=0.0)
            self.meter.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            # The optimizer's part: all that came after the last backward pass (clipping too, as ours has it in there).
            told = self.meter.end()
            link.answer(
                **told, loss=spent["loss"], backward_seconds=spent["backward"],
                optimizer_seconds=time.perf_counter() - spent["backward_ended"],
            )  # fmt: skip
            if self.first:
                write_gradients(gradients, first_moments(trainer))
            self.first = False

    tokenizer = build_tokenizer()
    # Where TRL pads is what we say: its own padding would come after generation, which is left out.
    options: dict[str, Any] = {
        "gradient_checkpointing": False, "loss_type": "dapo", "beta": 0.0, "epsilon": bench_step.CLIP,
        "max_grad_norm": 1.0, "lr_scheduler_type": "constant", "adam_beta1": bench_step.BETAS[0],
        "adam_beta2": bench_step.BETAS[1], "weight_decay": 0.0,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            scratch, use_cpu=True, bf16=task.dtype == "bfloat16", learning_rate=task.lr, max_steps=1_000_000,
            per_device_train_batch_size=rows, gradient_accumulation_steps=passes, num_generations=rollouts.group_size,
            max_completion_length=int(batch.lengths.max()), report_to="none", save_strategy="no", disable_tqdm=True,
            logging_steps=1_000_000, **options | way.learner,
        )  # fmt: skip
        trainer = Trainer(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True),
            reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config, processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": ["-"] * rollouts.groups}), callbacks=[Turns()],
        )  # fmt: skip
        backward = trainer.accelerator.backward

        def timed(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            backward(*args, **kwargs)
            spent["backward_ended"] = time.perf_counter()
            spent["backward"] += spent["backward_ended"] - began

        trainer.accelerator.backward = timed
        width = int(batch.prompt_lengths.max() + batch.lengths.max())
        link.answer(passes=passes, positions=len(batch.lengths) * width, budget=rows * width)
        with contextlib.suppress(_Over):
            trainer.train()


def first_moments(trainer: Any) -> Iterator[tuple[str, Any]]:
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    for name, parameter in sorted(trainer.model.named_parameters()):
        yield name, optimizer.state[parameter]["exp_avg"].numpy() / np.float32(1 - bench_step.BETAS[0])


def measure(names: list[str], task: Task, rounds: int, tell: Any) -> Iterator[dict[str, Any]]:
    """Turns of all ways; after every round what they have come to by then, see `bench_step_report.summarise`."""
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        folder, task_file = scratch / "model", scratch / "task.json"
        StepModel(**task.model).save(folder)
        task_file.write_text(json.dumps(asdict(task)), encoding="utf-8")
        gradients = {name: scratch / f"{name}.gradients" for name in names}
        tokens = bench_step.step_batch(BenchRollouts(**task.rollouts), task.model["vocabulary"]).tokens
        workers: list[Worker] = []
        turns: dict[str, list[Turn]] = {name: [] for name in names}
        try:
            for name in names:
                tell(f"{name}: starts")
                argv = ["--way", name, str(task_file), str(folder), str(gradients[name])]
                workers.append(Worker(name, [__file__, *argv], scratch / f"{name}.log"))
            facts = {worker.name: worker.facts for worker in workers}
            for number in range(rounds + 1):
                for worker in workers:
                    said = worker.turn()
                    tell(
                        f"{worker.name}, round {number} of {rounds}: {said['seconds']:.1f} s, {said['cpu_seconds']:.1f} s CPU"
                    )
                    turns[worker.name].append(Turn(**said))
                if number:
                    yield {"rounds": number} | summarise(
                        turns, facts, gradients, completion_tokens=tokens, exact=task.dtype == "float32"
                    )
        finally:
            for worker in workers:
                worker.close()


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["--way"]:
        name, task_file, folder, gradients = arguments[1], *map(Path, arguments[2:])
        task = Task(**json.loads(task_file.read_text(encoding="utf-8")))
        run = run_trl if WAYS[name].trl else run_own
        run(WAYS[name], task, folder, Link(), gradients)
        return
    parser = argparse.ArgumentParser(
        description="A training step of this learner against one of TRL's.",
        epilog="ways: " + "; ".join(f"{name}: {way.says}" for name, way in WAYS.items()),
    )
    parser.add_argument("--model", choices=MODELS, default="medium", help="size (default medium)")
    parser.add_argument("--groups", type=int, default=2, metavar="N")
    parser.add_argument("--group-size", type=int, default=8, metavar="G")
    parser.add_argument("--prompt", type=int, default=128, metavar="TOKENS", help="median")
    parser.add_argument("--completion", type=int, default=96, metavar="TOKENS", help="median")
    parser.add_argument("--spread", type=float, default=0.7, help="σ of the logarithm of lengths")
    parser.add_argument("--longest", type=int, default=320, metavar="TOKENS", help="bound of both lengths")
    parser.add_argument("--positions", type=int, default=2048, help="of one forward pass of TRL, at most")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--zero-stage", type=int, default=1, help="ours (default 1, the learner's)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="after one that warms up")
    parser.add_argument("--ways", default="trl,trl-completions,anabranch,anabranch-padded")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    args = parser.parse_args(arguments)
    names = args.ways.split(",")
    if unknown := [name for name in names if name not in WAYS]:
        parser.error(f"no such ways: {', '.join(unknown)}")
    if any(WAYS[name].trl for name in names) and not find_spec("trl"):
        raise SystemExit(HOW_TO_GET)
    rollouts = BenchRollouts(args.groups, args.group_size, args.prompt, args.completion, args.spread, args.longest)
    task = Task(
        asdict(MODELS[args.model]), asdict(rollouts), args.positions, args.dtype, 1e-6, args.threads, args.zero_stage
    )
    about = {
        "command": " ".join(["benchmarks/trl_step.py", *arguments]).partition(" --json")[0], "machine": machine_facts(),
        "trl": version("trl") if find_spec("trl") else None,
        "task": asdict(task), "ways_say": {name: WAYS[name].says for name in names},
    }  # fmt: skip
    figures: dict[str, Any] = {}
    for figures in measure(names, task, args.rounds, lambda line: print(line, file=sys.stderr, flush=True)):
        if args.json:
            args.json.write_text(json.dumps(about | figures, indent=1) + "\n", encoding="utf-8")
    print(as_table(figures))
    if problems := figures["apart"]:
        raise SystemExit("the ways do not compute the same: " + "; ".join(problems))


if __name__ == "__main__":
    main()
